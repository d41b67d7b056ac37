// Charts as SVG, in the pixels of the place they stand in: lines over time, bars, and shares. Colours are classes of style.css.

import { el, svg } from "./dom.js";

const HEIGHT = 150, LEFT = 42, RIGHT = 8, TOP = 18, BOTTOM = 20, LEAST = 240;

// The width that a chart has in an element, inside its padding.
export function widthIn(place) {
  const { paddingLeft, paddingRight } = getComputedStyle(place);
  return Math.max(LEAST, place.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight));
}

// Round numbers from 0 up to one at or above the value: three to five.
function levels(most) {
  const third = most / 3, power = 10 ** Math.floor(Math.log10(third));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= third * 0.999);
  return [...Array(Math.ceil(most / step - 0.001) + 1).keys()].map((one) => one * step);
}

const shown = (value) => (value >= 1000 ? `${+(value / 1000).toFixed(1)}k` : String(+value.toFixed(value < 10 ? 2 : 0)));

// The scale from 0 to at least `most`, drawn as rules with figures.
function scale(most, unit, width) {
  const all = levels(most), top = all.at(-1);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const parts = all.map((value) => [
    svg("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, shown(value) + (value ? unit : "")),
  ]);
  return { y, top, parts: parts.flat() };
}

const words = (x, text, anchor) => svg("text", { class: "tick", x, y: HEIGHT - 5, "text-anchor": anchor }, text);
const ends = (past, width, left = LEFT) => [words(left, past, "start"), words(width - RIGHT, "now", "end")];
const frame = (label, parts, width) => svg("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label }, parts);
const keys = (names, said = names) => names.map((_, number) => el("span", { class: `key series-${number % 8}` }, said[number]));
const known = (value) => value !== null && value !== undefined && isFinite(value);

// `series`: [{name, values}], oldest first, null where nothing was measured. `room`: points that the axis has; `past`: when it begins.
export function lines(title, series, width, { room, past, unit = "", floor = 0, base = null }) {
  const all = series.flatMap((one) => one.values).filter(known);
  const { y, top, parts } = scale(Math.max(floor, ...all, base ?? 0), unit, width);
  const x = (index, count) => width - RIGHT - ((count - 1 - index) / (room - 1)) * (width - LEFT - RIGHT);
  if (base !== null) parts.push(svg("line", { class: "base", x1: LEFT, x2: width - RIGHT, y1: y(base), y2: y(base) }));
  series.forEach((one, number) => {
    let path = "", area = "", begun = null;
    one.values.forEach((value, i) => {
      if (!known(value)) return;
      const place = `${x(i, one.values.length).toFixed(1)} ${y(Math.min(value, top)).toFixed(1)}`;
      path += `${known(one.values[i - 1]) ? "L" : "M"}${place}`;
      if (!known(one.values[i - 1])) begun = x(i, one.values.length).toFixed(1);
      area += `${known(one.values[i - 1]) ? "L" : `M${begun} ${y(0)}L`}${place}`;
      if (!known(one.values[i + 1])) area += `L${x(i, one.values.length).toFixed(1)} ${y(0)}Z`;
    });
    if (number === 0 && area) parts.push(svg("path", { class: "area series-0", d: area }));
    parts.push(svg("path", { class: `line series-${number}`, d: path || "M0 0" }));
  });
  const latest = series.map((one) => `${one.name} ${known(one.values.at(-1)) ? shown(one.values.at(-1)) + unit : "–"}`);
  return el("figure", {}, el("figcaption", {}, title, ...keys(series, latest)), frame(`${title}: ${latest.join(", ")}`, [...parts, ...ends(past, width)], width));
}

// `groups`: [{name, values}], with a label for each value. Figures stand on the bars; `marked` is the label of one that counts.
export function bars(title, labels, groups, width, { most = null, base = null, format = shown, axis = format, marked = null } = {}) {
  const { y, parts } = scale(Math.max(most ?? 0, ...groups.flatMap((group) => group.values), base ?? 0, 1e-9), "", width);
  for (const tick of parts) if (tick.tagName === "text") tick.textContent = axis(Number(tick.textContent));
  const slot = (width - LEFT - RIGHT) / labels.length, wide = Math.min(44, (slot - 4) / groups.length);
  labels.forEach((label, i) => {
    const centre = LEFT + slot * (i + 0.5);
    parts.push(words(centre, String(label), "middle"));
    groups.forEach((group, number) => {
      const value = group.values[i];
      if (!known(value)) return;
      const left = centre + (number - groups.length / 2) * wide;
      const faint = marked !== null && label !== marked ? " faint" : "";
      parts.push(svg("rect", { class: `fill series-${number}${faint}`, x: left + 1, y: y(value), width: wide - 2, height: Math.max(0, y(0) - y(value)), rx: 2 },
        svg("title", {}, `${group.name} ${label}: ${format(value)}`)));
      if (wide >= 26 || label === marked) parts.push(svg("text", { class: "figure", x: left + wide / 2, y: y(value) - 4, "text-anchor": "middle" }, format(value)));
    });
  });
  if (base !== null) parts.push(svg("line", { class: "base", x1: LEFT, x2: width - RIGHT, y1: y(base), y2: y(base) }));
  const names = groups.length > 1 ? keys(groups, groups.map((group) => group.name)) : [];
  const said = groups.map((group) => `${group.name} ${group.values.map((value) => (known(value) ? format(value) : "none")).join(", ")}`);
  return el("figure", {}, title || names.length ? el("figcaption", {}, title, ...names) : null, frame(`${title || "Bars"}: ${said.join("; ")}`, parts, width));
}

// Shares of each moment, stacked: `moments` is [{name: count}], oldest first.
export function stacks(title, names, moments, width, { room, past }) {
  const wide = width / room, top = 4, shapes = names.map(() => "");
  moments.forEach((counts, i) => {
    const sum = names.reduce((total, name) => total + (counts[name] ?? 0), 0), x = (room - moments.length + i) * wide;
    let y = top;
    if (sum) names.forEach((name, number) => {
      const height = ((HEIGHT - top - BOTTOM) * (counts[name] ?? 0)) / sum;
      if (height) shapes[number] += `M${x.toFixed(1)} ${y.toFixed(1)}h${Math.max(1, wide - 0.6).toFixed(1)}v${height.toFixed(1)}H${x.toFixed(1)}z`;
      y += height;
    });
  });
  const parts = shapes.map((d, number) => (d ? svg("path", { class: `fill series-${number % 8}`, d }) : null));
  parts.push(svg("line", { class: "rule", x1: 0, x2: width, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }), ...ends(past, width, 0));
  return el("figure", {}, el("figcaption", {}, title, ...keys(names)), frame(`${title}: ${names.join(", ")}`, parts, width));
}
