// Advise: the what-if calculator. The server computes (/v1/what-if); this view has the sliders and draws.

import { read, readLive } from "./api.js";
import { bars, widthIn } from "./chart.js";
import { $, el, number, percent, tile } from "./dom.js";

const DEEPEST = 16, BATCHES = [1, 2, 4, 8, 16, 32, 64];
const AXIS = { format: (one) => number(one, 2), axis: (one) => `${+one.toFixed(2)}×` };
const form = $("numbers");
let measured = null; // acceptance by depth, where the server's own is taken
let asked = 0;

const value = (name) => Number(form.elements[name].value);

function acceptance() {
  return measured ?? [...Array(DEEPEST).keys()].map((depth) => value("first") * value("decay") ** depth);
}

function labels() {
  const words = {
    first: percent(acceptance()[0]), decay: measured ? "measured" : number(value("decay"), 2), cost: number(value("cost"), 2),
    wide: `${number(value("wide"))}×`, batch: String(BATCHES[value("batch")]), depth: value("depth") ? String(value("depth")) : "the best",
  };
  for (const [name, text] of Object.entries(words)) form.elements[name].closest("label").querySelector("output").textContent = text;
}

function query(batches, depth) {
  const slope = (value("wide") - 1) / 63, most = BATCHES.at(-1) * (DEEPEST + 1);
  const fields = new URLSearchParams({
    acceptance: acceptance().map((rate) => rate.toFixed(4)).join(","), cost: String(value("cost")), batch: batches.join(","),
    rows: `1:1,64:${value("wide")},${most}:${1 + slope * (most - 1)}`,
  });
  if (depth) fields.set("depth", String(depth));
  if (value("tok_s") > 0) fields.set("tok_s", form.elements.tok_s.value);
  if (value("tok_s") > 0 && value("price_per_hour") > 0) fields.set("price_per_hour", form.elements.price_per_hour.value);
  return `/v1/what-if?${fields}`;
}

async function draw() {
  labels();
  const turn = (asked += 1);
  const [here, all] = await Promise.all([
    read(query([BATCHES[value("batch")]], value("depth"))), read(query(BATCHES, 0))]);
  if (turn !== asked) return; // a slider has moved meanwhile
  const [row] = here.data;
  $("advice").replaceChildren(
    tile("speed-up", `${number(row.speedup, 2)}×`), tile("tokens/step", number(row.tokens_per_step, 2)),
    tile("a step takes", `${number(row.step, 2)}×`), tile("depth", String(row.depth)),
    tile("breaks even at", row.break_even === null ? "never" : percent(row.break_even)),
    ...(row.per_million === undefined ? [] : [tile("a million tokens", `${number(row.plain_per_million, 2)} → ${number(row.per_million, 2)}`)]));
  $("by-depth").replaceChildren(bars("", row.by_depth.map((_, i) => i + 1), [{ name: "speed-up at depth", values: row.by_depth }], widthIn($("by-depth")), { base: 1, marked: row.depth, ...AXIS }));
  $("by-batch").replaceChildren(bars("", all.data.map((one) => one.batch), [{ name: "speed-up at batch", values: all.data.map((one) => one.best_speedup) }], widthIn($("by-batch")), { base: 1, marked: row.batch, ...AXIS }));
}

async function takeMeasured() {
  const drafters = Object.values((await readLive()).drafters).filter((one) => one.drafts[0] >= 20);
  const [best] = drafters.sort((a, b) => b.drafts[0] - a.drafts[0]);
  if (!best) {
    $("advice").replaceChildren(el("p", { class: "hint" }, "The server has verified too few drafts yet: run a few races first."));
    return;
  }
  // Of a token whose predecessors were accepted: drafts that reach a depth with all before it accepted.
  measured = best.drafts.slice(0, DEEPEST).map((_, depth) => {
    const reached = depth ? best.accepted[depth - 1] ?? 0 : best.drafts[0];
    return reached ? Math.min(1, (best.accepted[depth] ?? 0) / reached) : 0;
  });
  await draw();
}

const change = (work) => () => work().catch((problem) => $("advice").replaceChildren(el("p", { class: "hint" }, problem.message)));

form.addEventListener("input", (event) => {
  if (event.target.name === "first" || event.target.name === "decay") measured = null;
  change(draw)();
});
form.addEventListener("submit", (event) => event.preventDefault());
$("measured").addEventListener("click", change(takeMeasured));

export const enter = draw;
