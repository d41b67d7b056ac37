// Colours of tokens: by origin, and accepted ones by drafter. Colours are classes of style.css.

import { el } from "./dom.js";

const KNOWN = ["eagle", "lookup", "lm", "early_exit"];
const WORDS = {
  plain: "plain: one pass, one token",
  predicted: "accepted, from your predicted text",
  recovered: "recovered: the target's own in the place of a rejected draft token",
  bonus: "bonus: the target's own after a draft that was accepted whole",
};

export const colour = (drafter) => (KNOWN.includes(drafter) ? `by-${drafter}` : drafter.includes("+") ? "by-several" : "by-other");

export function classOf(token, drafter) {
  if (token.origin !== "accepted") return token.origin;
  return token.predicted ? "accepted predicted" : `accepted ${colour(drafter)}`;
}

// The legend has what the answers so far have.
export function drawLegend(place, seen) {
  const rows = [...seen].sort().map((kind) => {
    const drafter = kind.startsWith("accepted:") ? kind.slice(9) : null;
    const look = drafter !== null ? `accepted ${colour(drafter)}` : kind === "predicted" ? "accepted predicted" : kind;
    return el("li", {}, el("span", { class: `token ${look}` }, "token"), drafter === null ? WORDS[kind] : `accepted, drafted by ${drafter}`);
  });
  place.replaceChildren(...rows);
}

export const kindOf = (token, drafter) =>
  token.origin !== "accepted" ? token.origin : token.predicted ? "predicted" : `accepted:${drafter}`;
