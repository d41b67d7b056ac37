// The draft tree of one step: every drafted token, the accepted path, and the target's own token at its end.

import { el, svg } from "./dom.js";
import { colour } from "./origins.js";

const COLUMN = 108, ROW = 34, WIDTH = 92, HEIGHT = 24, LONGEST = 11;

// Spaces and line breaks made visible, cut to fit a node.
export function visible(text) {
  const seen = text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
  return seen.length > LONGEST ? `${seen.slice(0, LONGEST - 1)}…` : seen;
}

// Nodes with places: leaves one below the other, parents beside their first child.
function layout(step, before) {
  const nodes = [{ text: before, kind: "known", parent: null }];
  const accepted = new Set(step.accepted);
  step.draft.tokens.forEach((_, i) => nodes.push({
    text: step.draft.texts[i], parent: nodes[step.draft.parents[i] + 1], kind: accepted.has(i) ? "accepted" : "rejected",
  }));
  const own = step.tokens.slice(step.draft.tokens.length ? step.accepted.length : 0);
  let last = nodes[(step.accepted.at(-1) ?? -1) + 1];
  for (const token of own) nodes.push((last = { text: token.text, parent: last, kind: token.origin }));
  for (const node of nodes) node.children = [];
  for (const node of nodes) {
    node.depth = node.parent ? node.parent.depth + 1 : 0;
    // The path that was kept comes first, so that it is drawn as a line.
    if (node.parent) node.parent.children[node.kind === "rejected" ? "push" : "unshift"](node);
  }
  let row = 0;
  const place = (node) => {
    node.row = row;
    node.children.forEach((child, i) => { if (i) row += 1; place(child); });
  };
  place(nodes[0]);
  return { nodes, rows: row + 1, columns: Math.max(...nodes.map((node) => node.depth)) + 1 };
}

export function drawTree(step, before) {
  const { nodes, rows, columns } = layout(step, before);
  const width = columns * COLUMN - COLUMN + WIDTH + 4, height = rows * ROW;
  const left = (node) => 2 + node.depth * COLUMN, middle = (node) => node.row * ROW + ROW / 2;
  const edges = nodes.filter((node) => node.parent).map((node) => {
    const x1 = left(node.parent) + WIDTH, x2 = left(node), y1 = middle(node.parent), y2 = middle(node), half = (x1 + x2) / 2;
    return svg("path", { class: `edge ${node.kind}`, d: `M${x1} ${y1}C${half} ${y1} ${half} ${y2} ${x2} ${y2}` });
  });
  const boxes = nodes.map((node) => svg("g", { class: `node ${node.kind} ${node.kind === "accepted" ? colour(step.drafter) : ""}` },
    svg("title", {}, `${JSON.stringify(node.text)}, ${node.kind}`),
    svg("rect", { x: left(node), y: middle(node) - HEIGHT / 2, width: WIDTH, height: HEIGHT, rx: 7 }),
    svg("text", { x: left(node) + WIDTH / 2, y: middle(node) + 4, "text-anchor": "middle" }, visible(node.text))));
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describe(step) }, edges, boxes);
}

export function describe(step) {
  const drafted = step.draft.tokens.length;
  const made = drafted ? `${step.drafter} drafted ${drafted}, ${step.accepted.length} accepted` : "no draft";
  return `${made}, ${step.tokens.length} ${step.tokens.length === 1 ? "token" : "tokens"} in one pass`;
}

// What the planner decided, in words, and the numbers that it compared.
export function explain(step, index, count) {
  const { reason } = step;
  const facts = reason.facts.map((fact) => el("span", { class: "fact" },
    `${fact.name} `, el("b", {}, typeof fact.value === "number" ? String(+fact.value.toFixed(3)) : fact.value ?? ""),
    fact.bound === undefined ? null : ` > ${+Number(fact.bound).toFixed(3)}`));
  return [el("strong", {}, `Step ${index + 1} of ${count}: ${describe(step)}. `), `Planner: ${reason.depth ? `depth ${reason.depth}` : "off"}, ${reason.kind}. `, ...facts];
}
