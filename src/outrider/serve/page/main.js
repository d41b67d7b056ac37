// The page: which view is shown, which model is served, and what went wrong.

import { read } from "./api.js";
import { $, number } from "./dom.js";
import * as advise from "./advise.js";
import * as live from "./live.js";
import * as pairs from "./pairs.js";
import * as race from "./race.js";

const VIEWS = { race, live, pairs, advise };
let shown = null;

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
    const [card] = (await read("/v1/models")).data;
    $("model").textContent = card.max_model_len ? `${card.id} · ${number(card.max_model_len, 0)} tokens` : `${card.id} · loading`;
    race.serve(card, complain);
    if (card.max_model_len === null) setTimeout(begin, 1000);
  } catch (problem) {
    complain(problem.message);
    setTimeout(begin, 3000);
  }
}

addEventListener("hashchange", show);
show();
begin();
