// The page: which view is shown, which model is served, and what went wrong.

import { choose, post, read, readLive } from "./api.js";
import { $, el, number } from "./dom.js";
import * as advise from "./advise.js";
import * as live from "./live.js";
import * as pairs from "./pairs.js";
import * as race from "./race.js";

const VIEWS = { race, live, pairs, advise };
let shown = null;
let chosen = ""; // the model, where several are served

function show() {
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "race";
  if (name === shown) return;
  if (shown) VIEWS[shown].leave?.();
  for (const view of Object.keys(VIEWS)) $(view).hidden = view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shown = name;
  scrollTo(0, 0);
  complain("");
  VIEWS[name].enter?.().catch((problem) => complain(problem.message));
}

export function complain(message) {
  $("alert").textContent = message;
  $("alert").hidden = !message;
}

// Asks until the model is loaded.
async function begin() {
  try {
    const cards = (await read("/v1/models")).data;
    const { models } = await readLive().catch(() => ({ models: cards.map(({ id }) => id) })); // a proxy may hide it
    const card = cards.find(({ id }) => id === chosen) ?? cards[0];
    const length = card.max_model_len ? `${number(card.max_model_len, 0)} tokens` : card.state;
    $("model").replaceChildren(...(models.length > 1 ? [choice(models, card.id), ` · ${length}`] : [`${card.id} · ${length}`]));
    race.serve(card, complain);
    if (card.max_model_len === null) setTimeout(begin, 1000);
  } catch (problem) {
    complain(problem.message);
    setTimeout(begin, 3000);
  }
}

// A model that is not loaded yet is loaded by the first request that names it.
function choice(models, current) {
  const select = el("select", { "aria-label": "Model" }, ...models.map((name) => el("option", { value: name, selected: name === current }, name)));
  select.addEventListener("change", () => {
    chosen = select.value;
    choose(chosen);
    post("/tokenize", { model: chosen, prompt: "" }).catch((problem) => complain(problem.message)).finally(begin);
  });
  return select;
}

addEventListener("hashchange", show);
show();
begin();
