// Live: the snapshot of /v1/live, asked for every second while this view is shown and the tab is visible.

import { readLive } from "./api.js";
import { bars, lines, stacks } from "./chart.js";
import { $, large, number, percent, table, tile } from "./dom.js";

const EVERY = 1000, ROOM = 120, RECENT = 30; // milliseconds; points of a chart; points of a percentile
let timer = null;
const past = []; // snapshots, oldest first

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

function draw() {
  const now = past.at(-1), first = past[0];
  const pairs = past.slice(1).map((one, i) => [one, past[i], past[Math.max(0, i + 1 - RECENT)]]);
  const over = (measure) => pairs.map(measure);
  $("live-state").textContent = now.ready
    ? `${now.model} takes requests${now.prepared ? "" : ", some drafts are still being prepared"}. ${large(now.generation_tokens)} tokens since the start.`
    : `${now.model} does not take requests now.`;
  const speed = pairs.length ? perSecond.tokens(now, past[Math.max(0, past.length - 4)]) : 0;
  const busy = (one, before) => one.steps > before.steps;
  $("tiles").replaceChildren(
    tile("tokens/s", number(speed)), tile("running", String(now.running)), tile("waiting", String(now.waiting)),
    tile("speed-up", now.recent_speedup ? `${number(now.recent_speedup, 2)}×` : "–"),
    tile("p50 ms/token", number(quantile(now, past[Math.max(0, past.length - RECENT)], 0.5))),
    tile("p99 ms/token", number(quantile(now, past[Math.max(0, past.length - RECENT)], 0.99))),
    tile("KV cache", percent(now.kv_cache_usage)));
  $("charts").replaceChildren(
    lines("Tokens per second", [
      { name: "generated", values: over(([one, before]) => perSecond.tokens(one, before)) },
      { name: "prompts", values: over(([one, before]) => perSecond.prompt(one, before)) }], { room: ROOM, floor: 10 }),
    lines("Requests", [
      { name: "running", values: over(([one]) => one.running) }, { name: "waiting", values: over(([one]) => one.waiting) }], { room: ROOM, floor: 4 }),
    lines("Speed-up against plain decoding", [
      { name: "measured", values: over(([one, before]) => (busy(one, before) ? one.recent_speedup : null)) }], { room: ROOM, floor: 2, base: 1, unit: "×" }),
    lines("Time per token, 30 s", [
      { name: "p50", values: over(([one, , old]) => quantile(one, old, 0.5)) },
      { name: "p99", values: over(([one, , old]) => quantile(one, old, 0.99)) }], { room: ROOM, floor: 10, unit: " ms" }),
    lines("KV cache in use", [{ name: "share", values: over(([one]) => 100 * one.kv_cache_usage) }], { room: ROOM, floor: 100, unit: " %" }));
  drawDrafters(now.drafters);
  drawDecisions(now, pairs);
}

function drawDrafters(drafters) {
  const known = Object.entries(drafters);
  const drafting = known.filter(([, one]) => one.drafts.length);
  const deepest = Math.min(10, Math.max(0, ...drafting.map(([, one]) => one.drafts.length)));
  const depths = [...Array(deepest).keys()];
  const groups = drafting.map(([name, one]) => ({ name, values: depths.map((d) => (one.drafts[d] ? (one.accepted[d] ?? 0) / one.drafts[d] : null)) }));
  $("acceptance").replaceChildren(groups.length ? bars(groups.length === 1 ? groups[0].name : "", depths.map((d) => d + 1), groups, { most: 1 }) : "No drafts yet.");
  $("drift").replaceChildren(known.length
    ? table(["Drafter", "First token accepted", "on its card", "Target's probability", "on its card"], known.map(([name, one]) =>
      [name, percent(one.recent_acceptance), percent(one.card_acceptance), percent(one.recent_target_probability), percent(one.card_target_probability)]))
    : "No drafts yet.");
}

function drawDecisions(now, pairs) {
  const names = Object.keys(now.decisions).sort((a, b) => now.decisions[b].count - now.decisions[a].count);
  const moments = pairs.map(([one, before]) => Object.fromEntries(names.map((name) =>
    [name, (one.decisions[name]?.count ?? 0) - (before.decisions[name]?.count ?? 0)])));
  $("decisions-chart").replaceChildren(stacks("Share of decisions", names, moments, ROOM, matchMedia("(max-width: 760px)").matches ? 360 : 900));
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
