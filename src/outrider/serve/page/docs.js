// /docs: the OpenAPI document, rendered. Bodies and answers are tables of fields; nested ones open on demand.

import { read } from "./api.js";
import { $, el, table } from "./dom.js";

let schemas = {};

const named = (schema) => schema?.$ref?.split("/").at(-1);
const resolved = (schema) => (named(schema) ? schemas[named(schema)] : schema) ?? {};
const unions = (schema) => schema.anyOf ?? schema.oneOf ?? null;

// A type in words: "string or null", "list of Step".
function typeOf(schema) {
  if (named(schema)) return named(schema);
  if (unions(schema)) return unions(schema).map(typeOf).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}`;
  if (schema.type === "object" && typeof schema.additionalProperties === "object" && Object.keys(schema.additionalProperties).length)
    return `object of ${typeOf(schema.additionalProperties)}`;
  return [schema.type ?? "anything"].flat().join(" or ");
}

// A bound of many digits only says that the number must fit: it is left out.
function bounds(schema) {
  const each = unions(schema) ?? [schema], far = 1e6;
  const [least, most] = ["minimum", "maximum"].map((name) => each.find((one) => Math.abs(one[name]) < far)?.[name]);
  if (least !== undefined && most !== undefined) return `${least} to ${most}`;
  return least !== undefined ? `${least} or more` : most !== undefined ? `${most} or less` : "";
}

// Names of structs inside a schema, through lists, objects and unions.
function inside(schema) {
  if (named(schema)) return [named(schema)];
  return [...(unions(schema) ?? []), schema.items, schema.additionalProperties].filter((one) => one && typeof one === "object").flatMap(inside);
}

// Something that is made when it is first opened.
function folded(title, make) {
  const made = el("details", {}, el("summary", {}, title));
  made.addEventListener("toggle", () => made.append(...make()), { once: true });
  return made;
}

function fields(schema, above = []) {
  const { properties = {}, required = [], description } = resolved(schema);
  const rows = Object.entries(properties).map(([name, one]) => {
    const nested = inside(one).filter((struct) => !above.includes(struct) && schemas[struct]?.properties);
    const type = [el("span", { class: "type" }, typeOf(one)), ...nested.map((struct) =>
      folded(struct, () => fields({ $ref: `#/${struct}` }, [...above, struct])))];
    const usual = one.default === undefined ? "" : JSON.stringify(one.default);
    return [el("code", {}, name), el("div", {}, ...type), bounds(one), required.includes(name) ? "required" : usual];
  });
  const words = description ? [el("p", { class: "hint" }, description)] : [];
  return [...words, rows.length
    ? el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `Fields of ${named(schema) ?? "the object"}` }, table(["Field", "Type", "Range", "Default"], rows))
    : el("p", { class: "type" }, typeOf(resolved(schema)))];
}

// The least that the route accepts, as a command to copy.
function command(path, method, operation) {
  const content = operation.requestBody?.content ?? {};
  const form = content["multipart/form-data"]?.schema.required.map((name) => ` \\\n  -F ${name === "file" ? "file=@FILE" : `${name}=batch`}`).join("");
  const url = `${location.origin}${path.replaceAll(/{(\w+)}/g, (_, name) => name.toUpperCase())}`;
  if (method !== "post") return `curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${url}`;
  if (form) return `curl ${url}${form}`;
  const { properties = {}, required = [] } = resolved(content["application/json"]?.schema);
  const example = {
    messages: [{ role: "user", content: "Hello!" }], prompt: "Once upon", input: "Hello!", tokens: [1, 2], max_tokens: 64, endpoint: "/v1/chat/completions",
    completion_window: "24h", input_file_id: "FILE_ID",
  };
  const sent = Object.fromEntries(Object.keys(properties).filter((name) => required.includes(name)).map((name) => [name, example[name] ?? "NAME"]));
  return `curl ${url} \\\n  -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(sent)}'`;
}

// A body or an answer, with its fields.
function shape(title, content) {
  const [kind, { schema } = {}] = Object.entries(content ?? {})[0] ?? [];
  if (!schema) return null;
  return [el("h3", {}, `${title}: ${named(schema) ?? (kind === "application/json" ? "JSON" : "a form")}`), ...fields(schema, [named(schema)])];
}

function parameters(all) {
  if (!all) return null;
  const rows = all.map((one) => [el("code", {}, one.name), el("span", { class: "type" }, typeOf(one.schema)), one.in, one.required ? "required" : "no"]);
  return [el("h3", {}, "Parameters"), el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Parameters" }, table(["Name", "Type", "In", "Needed"], rows))];
}

function drawn([path, method, operation]) {
  const failures = Object.entries(operation.responses).filter(([status]) => status !== "200").map(([status, one]) => [status, one.description]);
  return el("article", { class: "card operation", id: anchor(path, method) },
    el("h2", {}, el("span", { class: `verb ${method}` }, method.toUpperCase()), path), el("p", {}, operation.summary),
    parameters(operation.parameters), shape("Body", operation.requestBody?.content), shape("Answer", operation.responses["200"].content),
    el("h3", {}, "Command"), el("pre", { tabindex: 0 }, command(path, method, operation)),
    folded("Errors", () => [table(["Status", "Meaning"], failures)]));
}

const anchor = (path, method) => `${method}${path.replaceAll(/[^a-z0-9]+/gi, "-")}`;

async function draw() {
  const found = await read("/openapi.json");
  schemas = found.components.schemas;
  $("model").textContent = `${found.info.title} ${found.info.version}`;
  const all = Object.entries(found.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, one]) => [path, method, one]));
  for (const { name } of found.tags) {
    const group = all.filter(([, , one]) => one.tags.includes(name));
    $("contents").append(el("b", {}, name), ...group.map(([path, method]) =>
      el("a", { href: `#${anchor(path, method)}` }, el("span", { class: `verb ${method}` }, method.toUpperCase()), path)));
    $("operations").append(...group.map(drawn));
  }
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

draw().catch((problem) => {
  $("alert").textContent = problem.message;
  $("alert").hidden = false;
});
