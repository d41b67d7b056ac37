// Live: the snapshot of /v1/live, asked for every three seconds while this view is shown and the tab is visible.

import { readLive } from "./api.js";
import { bars, lines, stacks, widthIn } from "./chart.js";
import { $, el, large, number, percent, table, tile } from "./dom.js";

const EVERY = 3000, ROOM = 60, LEAST = 10, RECENT = 10, FEW = 5; // milliseconds; points of a chart, at most and at least; of a percentile; of an acceptance
let timer = null;
const past = []; // snapshots, oldest first
const reasons = []; // the planner's, in the order of their colours

const counted = (name) => (now, before) => Math.max(0, now[name] - before[name]) / Math.max(1e-3, now.time - before.time);
const perSecond = { tokens: counted("generation_tokens"), prompt: counted("prompt_tokens") };

// The time that a share of the tokens counted between two snapshots did not exceed, in milliseconds.
export function quantile(now, before, share) {
  const counts = now.token_counts.map((count, i) => count - (before.token_counts[i] ?? 0));
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = share * total;
  const place = counts.findIndex((count) => (left -= count) <= 0);
  return 1000 * (now.token_seconds[place] ?? now.token_seconds.at(-1));
}

const PLACES = ["rate", "speed-up", "times", "requests", "accepted", "cache", "acceptance", "decisions-chart"];

function draw() {
  // All widths before anything changes: read between changes, each would lay the page out again.
  const widths = Object.fromEntries(PLACES.map((id) => [id, widthIn($(id))]));
  const now = past.at(-1), first = past[0];
  const pairs = past.slice(1).map((one, i) => [one, past[i], past[Math.max(0, i + 1 - RECENT)]]);
  const over = (measure) => pairs.map(measure);
  $("live-state").textContent = now.ready
    ? `${now.model} takes requests${now.prepared ? "" : ", some drafts are still being prepared"}. ${large(now.generation_tokens)} tokens since the start.`
    : `${now.model} does not take requests now.`;
  const speed = pairs.length ? perSecond.tokens(now, past[Math.max(0, past.length - 3)]) : 0;
  const busy = (one, before) => one.steps > before.steps;
  $("tiles").replaceChildren(
    tile("tokens/s", number(speed)), tile("running", String(now.running)), tile("waiting", String(now.waiting)),
    tile("speed-up", now.recent_speedup ? `${number(now.recent_speedup, 2)}×` : "–"),
    tile("p50 ms/token", number(quantile(now, past[Math.max(0, past.length - RECENT)], 0.5))),
    tile("p99 ms/token", number(quantile(now, past[Math.max(0, past.length - RECENT)], 0.99))),
    tile("KV cache", percent(now.kv_cache_usage)));
  const axis = { room: Math.max(LEAST, pairs.length), past: ago(now, first, pairs.length) };
  const chart = (id, title, series, options) => $(id).replaceChildren(lines(title,
    Object.entries(series).map(([name, measure]) => ({ name, values: over(measure) })), widths[id], { ...axis, ...options }));
  chart("rate", "Tokens per second", { written: ([one, before]) => perSecond.tokens(one, before), read: ([one, before]) => perSecond.prompt(one, before) }, { floor: 10 });
  chart("speed-up", "Speed-up against plain decoding", { measured: ([one, before]) => (busy(one, before) ? one.recent_speedup : null) }, { floor: 2, base: 1, unit: "×" });
  chart("times", "Time per token in ms, last 30 s", { p50: ([one, , old]) => quantile(one, old, 0.5), p99: ([one, , old]) => quantile(one, old, 0.99) }, { floor: 10 });
  chart("requests", "Requests", { running: ([one]) => one.running, waiting: ([one]) => one.waiting }, { floor: 4 });
  chart("accepted", "First draft tokens accepted, last 15 s", Object.fromEntries(Object.keys(now.drafters).map((name) =>
    [name, ([one], i) => accepted(one, past[Math.max(0, i + 1 - FEW)], name)])), { floor: 100, unit: " %" });
  chart("cache", "KV cache in use", { share: ([one]) => 100 * one.kv_cache_usage }, { floor: 100, unit: " %" });
  drawDrafters(now.drafters, widths.acceptance);
  drawDecisions(now, pairs, widths["decisions-chart"], axis);
}

// When the axis of the charts begins, in words.
function ago(now, first, points) {
  const seconds = points ? ((now.time - first.time) / points) * Math.max(LEAST, points) : (LEAST * EVERY) / 1000;
  return seconds < 100 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}

// The share of first draft tokens that were accepted between two snapshots, in percent.
function accepted(now, before, name) {
  const [one, old] = [now, before].map((each) => each.drafters[name] ?? { drafts: [], accepted: [] });
  const drafts = (one.drafts[0] ?? 0) - (old.drafts[0] ?? 0);
  return drafts > 0 ? (100 * ((one.accepted[0] ?? 0) - (old.accepted[0] ?? 0))) / drafts : null;
}

function drawDrafters(drafters, width) {
  const known = Object.entries(drafters);
  const drafting = known.filter(([, one]) => one.drafts.length);
  const deepest = Math.min(10, Math.max(0, ...drafting.map(([, one]) => one.drafts.length)));
  const depths = [...Array(deepest).keys()];
  const groups = drafting.map(([name, one]) => ({ name, values: depths.map((d) => (one.drafts[d] ? (one.accepted[d] ?? 0) / one.drafts[d] : null)) }));
  $("acceptance").replaceChildren(groups.length
    ? bars(groups.length === 1 ? groups[0].name : "", depths.map((d) => d + 1), groups, width, { most: 1, format: percent })
    : el("p", { class: "none" }, "No drafts yet."));
  $("drift").replaceChildren(known.length
    ? table(["Drafter", "First token accepted", "on its card", "Target's probability", "on its card"], known.map(([name, one]) =>
      [name, percent(one.recent_acceptance), percent(one.card_acceptance), percent(one.recent_target_probability), percent(one.card_target_probability)]))
    : el("p", { class: "none" }, "No drafts yet."));
}

function drawDecisions(now, pairs, width, axis) {
  for (const name of Object.keys(now.decisions)) if (!reasons.includes(name)) reasons.push(name);
  const names = reasons.filter((name) => name in now.decisions);
  const moments = pairs.map(([one, before]) => Object.fromEntries(names.map((name) =>
    [name, (one.decisions[name]?.count ?? 0) - (before.decisions[name]?.count ?? 0)])));
  if (!names.length) {
    $("decisions-chart").replaceChildren(el("p", { class: "none" }, "No decisions yet."));
    return;
  }
  $("decisions-chart").replaceChildren(stacks("Share of decisions", names, moments, width, axis));
  names.sort((a, b) => now.decisions[b].count - now.decisions[a].count);
  $("decisions").replaceChildren(table(["Reason", "Meaning", "Latest, with its numbers", "Times"], names.map((name) =>
    [name, now.decisions[name].meaning, now.decisions[name].latest ?? "–", large(now.decisions[name].count)])));
}

async function poll() {
  if (document.hidden) return;
  const now = await readLive();
  if (past.length && past[0].model !== now.model) past.length = 0;
  past.push(now);
  if (past.length > ROOM + 1) past.shift();
  draw();
}

export async function enter() {
  past.length = 0; // a gap would be drawn as one moment
  await poll();
  const again = async () => {
    try {
      await poll();
    } catch (problem) {
      $("live-state").textContent = problem.message;
    }
    if (timer !== null) timer = setTimeout(again, EVERY);
  };
  timer = setTimeout(again, EVERY);
}

export function leave() {
  clearTimeout(timer);
  timer = null;
}
