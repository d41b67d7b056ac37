// Elements. Text is only ever set as text: nothing here, or anywhere in the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export function table(titles, rows) {
  const head = el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title)));
  const body = rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, body));
}

export const tile = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));

const FORMATS = [0, 1, 2].map((digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));

export const number = (value, digits = 1) =>
  value === null || value === undefined || !isFinite(value) ? "–" : FORMATS[digits].format(value);

export const percent = (value) => (value === null || value === undefined ? "–" : `${number(100 * value, 0)} %`);

export function large(count) {
  for (const [unit, size] of [["B", 1e9], ["M", 1e6], ["k", 1e3]]) if (count >= size) return `${number(count / size)} ${unit}`;
  return String(count ?? "–");
}
