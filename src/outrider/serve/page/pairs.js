// Pairs: the catalogue, a card each.

import { read } from "./api.js";
import { bars, widthIn } from "./chart.js";
import { $, el, large, number, percent, table, tile } from "./dom.js";

const times = (value) => (value ? `${number(value, 2)}×` : "–");

// Accepted over reached positions, by depth, over all tasks of a card.
function byDepth(tasks, kind) {
  const reached = [], accepted = [];
  for (const task of tasks) task[kind].reached.forEach((count, depth) => {
    reached[depth] = (reached[depth] ?? 0) + count;
    accepted[depth] = (accepted[depth] ?? 0) + task[kind].accepted[depth];
  });
  return reached.map((count, depth) => (count ? Math.min(1, accepted[depth] / count) : null));
}

const perStep = (one) => (one.steps ? one.tokens / one.steps : null);

function score(card) {
  const tasks = card.score?.tasks ?? [];
  if (!tasks.length) return [el("p", { class: "hint" }, "This pair has no score yet: outrider pairs score.")];
  const rows = tasks.map((task) => [task.task, number(task.temperature), String(task.prompts), number(perStep(task.chain), 2), number(perStep(task.tree), 2), times(task.speedup)]);
  return [
    el("div", { class: "by-depth" }),
    el("details", {}, el("summary", {}, `By task (${tasks.length})`),
      el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Scores by task" },
        table(["Task", "Temperature", "Prompts", "Tokens/step, chain", "tree", "Speed-up"], rows))),
  ];
}

function depths(tasks, width) {
  const chain = byDepth(tasks, "chain"), tree = byDepth(tasks, "tree").slice(0, chain.length);
  return bars("Accepted, by depth", chain.map((_, i) => i + 1), [{ name: "chain", values: chain }, { name: "tree", values: tree }], width, { most: 1, format: percent });
}

function drawn(pair) {
  const { card } = pair;
  return el("article", { class: "card pair" },
    el("header", {}, el("h2", {}, pair.name), el("span", { class: pair.in_use ? "badge on" : "badge" }, pair.in_use ? "in use" : pair.source)),
    el("p", { class: "hint" }, `For ${card.target.name}, ${large(card.target.parameters)} parameters. The draft is ${card.draft.kind}, ${large(card.draft.parameters)} parameters; read by ${card.draft.engines.join(", ")}.`),
    el("dl", { class: "tiles" },
      tile("tokens/step", number(pair.tokens_per_step, 2)), tile("accepted", percent(pair.accept_rate)), tile("speed-up", times(pair.speedup ?? pair.expected_speedup)),
      tile("size", `1 : ${number(pair.ratio >= 1 ? pair.ratio : 1 / pair.ratio, 0)}`)),
    score(card),
    el("p", { class: "hint" }, `Licence ${card.licence ?? "not stated"}. Trained on ${card.trained_tokens ? large(card.trained_tokens) : "an unknown number of"} tokens.`));
}

export async function enter() {
  const data = (await read("/v1/pairs")).data.sort((one, other) => other.in_use - one.in_use);
  $("cards").replaceChildren(...(data.length ? data.map(drawn) : [el("p", { class: "none" }, "There are no pairs yet: outrider distill makes one.")]));
  document.querySelectorAll(".by-depth").forEach((place, i) => place.append(depths(data.filter(({ card }) => card.score?.tasks.length)[i].card.score.tasks, widthIn(place))));
}
