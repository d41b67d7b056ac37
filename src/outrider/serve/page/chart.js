// Charts as SVG: lines over time, and bars. Colours are classes of style.css.

import { el, svg } from "./dom.js";

const NARROW = 360, HEIGHT = 130, LEFT = 38, RIGHT = 6, TOP = 8, BOTTOM = 18;

// A round number at or above the value.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((bound) => bound >= value * 0.999);
}

const shown = (value) => (value >= 1000 ? `${+(value / 1000).toFixed(1)}k` : String(+value.toFixed(value < 10 ? 2 : 0)));

function axes(most, unit, width) {
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
  const lines = [0, most / 2, most].map((value) => [
    svg("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 5, y: y(value) + 3.5, "text-anchor": "end" }, shown(value) + (value ? unit : "")),
  ]);
  return { y, parts: lines.flat() };
}

const frame = (label, parts, width = NARROW) => svg("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label }, parts);

// `series`: [{name, values}], oldest first, null where nothing was measured. `room`: points that the axis has.
export function lines(title, series, { room = 120, unit = "", floor = 0, base = null } = {}) {
  const all = series.flatMap((one) => one.values).filter((value) => value !== null && isFinite(value));
  const most = ceiling(Math.max(floor, ...all, base ?? 0, 1e-9));
  const { y, parts } = axes(most, unit, NARROW);
  const x = (index, count) => NARROW - RIGHT - ((count - 1 - index) / (room - 1)) * (NARROW - LEFT - RIGHT);
  if (base !== null) parts.push(svg("line", { class: "base", x1: LEFT, x2: NARROW - RIGHT, y1: y(base), y2: y(base) }));
  series.forEach((one, number) => {
    let path = "";
    one.values.forEach((value, i) => {
      if (value === null || !isFinite(value)) return;
      const begins = path === "" || one.values[i - 1] === null;
      path += `${begins ? "M" : "L"}${x(i, one.values.length).toFixed(1)} ${y(Math.min(value, most)).toFixed(1)}`;
    });
    parts.push(svg("path", { class: `line series-${number}`, d: path || "M0 0" }));
  });
  const latest = series.map((one) => `${one.name} ${one.values.at(-1) === null || one.values.at(-1) === undefined ? "none" : shown(one.values.at(-1)) + unit}`);
  const keys = series.length > 1 ? series.map((one, number) => el("span", { class: `key series-${number}` }, one.name)) : [];
  return el("figure", {}, el("figcaption", {}, title, ...keys), frame(`${title}: ${latest.join(", ")}`, parts));
}

// `groups`: [{name, values}], with a label for each value. Figures stand on the bars.
export function bars(title, labels, groups, { most = null, base = null, format = shown, width = NARROW } = {}) {
  const top = ceiling(most ?? Math.max(...groups.flatMap((group) => group.values), base ?? 0, 1e-9));
  const { y, parts } = axes(top, "", width);
  const slot = (width - LEFT - RIGHT) / labels.length, wide = Math.min(30, (slot - 4) / groups.length);
  if (base !== null) parts.push(svg("line", { class: "base", x1: LEFT, x2: width - RIGHT, y1: y(base), y2: y(base) }));
  labels.forEach((label, i) => {
    const centre = LEFT + slot * (i + 0.5);
    parts.push(svg("text", { class: "tick", x: centre, y: HEIGHT - 5, "text-anchor": "middle" }, String(label)));
    groups.forEach((group, number) => {
      const value = group.values[i];
      if (value === undefined || value === null) return;
      const left = centre + (number - groups.length / 2) * wide;
      parts.push(svg("rect", { class: `fill series-${number}`, x: left + 1, y: y(value), width: wide - 2, height: Math.max(0, y(0) - y(value)), rx: 2 },
        svg("title", {}, `${group.name} ${label}: ${format(value)}`)));
      if (wide >= 16) parts.push(svg("text", { class: "figure", x: left + wide / 2, y: y(value) - 3, "text-anchor": "middle" }, format(value)));
    });
  });
  const keys = groups.length > 1 ? groups.map((group, number) => el("span", { class: `key series-${number}` }, group.name)) : [];
  const said = groups.map((group) => `${group.name} ${group.values.map((value) => (value === null ? "none" : format(value))).join(", ")}`);
  return el("figure", {}, title || keys.length ? el("figcaption", {}, title, ...keys) : null, frame(`${title || "Bars"}: ${said.join("; ")}`, parts, width));
}

// Shares of each moment, stacked: `moments` is [{name: count}], oldest first.
export function stacks(title, names, moments, room, width) {
  const parts = [], wide = width / room;
  moments.forEach((counts, i) => {
    const sum = names.reduce((total, name) => total + (counts[name] ?? 0), 0);
    let top = TOP;
    if (sum) names.forEach((name, number) => {
      const height = ((HEIGHT - TOP - BOTTOM) * (counts[name] ?? 0)) / sum;
      if (height) parts.push(svg("rect", { class: `fill series-${number % 8}`, x: (room - moments.length + i) * wide, y: top, width: Math.max(1, wide - 0.6), height }));
      top += height;
    });
  });
  parts.push(svg("line", { class: "rule", x1: 0, x2: width, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  const keys = names.map((name, number) => el("span", { class: `key series-${number % 8}` }, name));
  return el("figure", {}, el("figcaption", {}, title, ...keys), frame(`${title}: ${names.join(", ")}`, parts, width));
}
