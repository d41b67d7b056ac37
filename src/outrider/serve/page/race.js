// Chat and race: one conversation, answered plainly and speculatively with the same seed.

import { readLive, stream } from "./api.js";
import { $, el, number } from "./dom.js";
import { classOf, drawLegend, kindOf } from "./origins.js";
import { drawTree, explain } from "./tree.js";

let card = null; // of the served model
let complain = () => {};
let running = null; // what Stop aborts
let others = null; // cores that other programs used during the latest race
let warm = false; // the first request of a server pays for set-up, and must not count against its lane
const seen = new Set(); // kinds of tokens, for the legend
const PIECE = 500; // tokens: each picture lays the last piece out again; in one piece, a long answer would block Stop
const PICTURE = 100; // milliseconds between two pictures of an answer that is being written
const BUSY = 0.5; // cores that other programs used, a browser among them: times say little then
const RECENT = 40; // pieces that are drawn even out of sight: more than a lane shows

const EXAMPLES = {
  Edit: "Correct the spelling and change nothing else: The outridder rode ahead of the cariage. He watched the road, and he watched the trees beside the road. When the road was clear he waved, and the cariage went on. When the road was not clear he waited, and the cariage waited with him.",
  Code: "Write a Python class for a bank account with deposit and withdraw.",
  List: "List the planets of the solar system in order, one per line. Then list them again.",
  Chat: "Why is the sky blue?",
};

// One of the two answers: its conversation, its figures, its tokens.
class Lane {
  constructor(name) {
    this.root = $(name);
    this.name = name;
    this.talk = this.root.querySelector(".talk");
    this.talk.addEventListener("pointerover", (event) => this.point(event.target));
    this.talk.addEventListener("click", (event) => this.point(event.target));
    this.talk.addEventListener("keydown", (event) => this.move(event));
    this.grown = new ResizeObserver(() => this.follow());
    this.reset();
  }

  reset() {
    this.messages = [];
    this.steps = []; // of the latest answer
    this.talk.replaceChildren();
    this.salt = crypto.randomUUID?.() ?? String(Math.random()); // else lookup would copy the other lane's answer
    this.figures({});
  }

  figures({ rate, seconds, passes, share = 0 }) {
    this.root.querySelector(".rate").textContent = number(rate);
    this.root.querySelector(".time").textContent = number(seconds, 2);
    this.root.querySelector(".passes").textContent = passes ?? "–";
    this.root.querySelector(".track i").style.width = `${100 * Math.min(1, share)}%`;
  }

  ask(text) {
    this.messages.push({ role: "user", content: text });
    this.answer = el("p", { class: "answer" });
    this.talk.append(el("p", { class: "user" }, text), this.answer);
    this.grown.disconnect();
    this.grown.observe(this.answer);
    Object.assign(this, { steps: [], times: [], text: "", written: 0, tokens: 0, piece: null, end: 0, report: null, wall: 0, current: -1 });
    this.figures({});
  }

  events(settings, salt, signal) {
    const body = { ...settings, ...prompt(this.messages), cache_salt: salt };
    return stream(card.chat ? "/v1/chat/completions" : "/v1/completions", body, signal);
  }

  async warmUp(settings, signal) {
    for await (const _ of this.events({ ...settings, max_tokens: 8 }, `${this.salt} warm-up`, signal));
  }

  async run(settings, signal) {
    const begun = performance.now();
    try {
      for await (const event of this.events(settings, this.salt, signal)) {
        const [choice] = event.choices;
        this.text += choice.delta?.content ?? choice.text ?? "";
        for (const step of choice.steps ?? []) {
          this.steps.push(step);
          this.times.push((performance.now() - begun) / 1000);
        }
        this.draw(settings.max_tokens);
        this.report = event.metrics ?? this.report;
      }
    } finally {
      this.wall = (performance.now() - begun) / 1000;
      this.messages.push({ role: "assistant", content: this.text });
      this.write(this.steps.length);
      this.show(this.wall, settings.max_tokens, this.report?.tokens_per_second);
    }
  }

  // Not with every step: on the engine's own machine each picture takes time from the engine.
  draw(most) {
    this.frame ??= setTimeout(() => {
      this.frame = null;
      if (this.wall) return; // it has ended, and is drawn
      this.write(this.steps.length);
      this.show(this.times.at(-1) ?? 0, most);
    }, PICTURE);
  }

  // Writes the steps that have not been written yet, up to the one with this number.
  write(until) {
    if (this.written >= until) return;
    const kinds = seen.size;
    for (; this.written < until; this.written += 1) {
      const step = this.steps[this.written];
      for (const token of step.tokens) {
        const look = { class: `token ${classOf(token, step.drafter)}`, "data-step": this.written, "data-origin": token.origin };
        this.place(el("span", look, token.text));
        seen.add(kindOf(token, step.drafter));
      }
      this.tokens += step.tokens.length;
    }
    if (seen.size !== kinds) drawLegend($("legend"), seen);
  }

  // A piece ends with a line, or where it is long.
  place(token) {
    if (!this.piece || this.piece.childElementCount >= PIECE || this.piece.lastChild.textContent.endsWith("\n")) {
      this.piece = el("span", { class: "piece" });
      this.answer.append(this.piece);
      this.answer.children[this.answer.childElementCount - RECENT]?.classList.add("past");
    }
    this.piece.append(token);
  }

  // Shows the end of the answer, unless the reader has scrolled back.
  follow() {
    if (this.talk.scrollTop < this.end - 4) return;
    this.talk.scrollTop = this.talk.scrollHeight;
    this.end = this.talk.scrollTop;
  }

  show(seconds, most, rate) {
    const spent = seconds - (this.times[0] ?? seconds);
    const first = this.steps[0]?.tokens.length ?? 0;
    this.figures({ rate: rate ?? (spent > 0 ? (this.tokens - first) / spent : NaN), seconds, passes: this.written, share: this.tokens / most });
  }

  point(target) {
    const token = target.closest?.(".token");
    if (token && this.answer.contains(token)) this.select(Number(token.dataset.step));
  }

  move(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by || !this.steps?.length) return;
    event.preventDefault();
    this.select(Math.max(0, Math.min(this.steps.length - 1, (this.current ?? -1) + by)));
  }

  select(index) {
    for (const lane of lanes) for (const token of lane.talk.querySelectorAll(".selected")) token.classList.remove("selected");
    const own = this.answer.querySelectorAll(`[data-step="${index}"]`);
    own.forEach((token) => token.classList.add("selected"));
    if (this.current === index && shownLane === this) return;
    this.current = index;
    shownLane = this;
    const before = index ? this.steps[index - 1].tokens.at(-1).text : "prompt";
    $("why").replaceChildren(...explain(this.steps[index], index, this.steps.length));
    $("tree").replaceChildren(drawTree(this.steps[index], before));
  }

  // Plays the recorded answer again, as fast as it came.
  replay(signal, longest) {
    this.answer.replaceChildren();
    Object.assign(this, { written: 0, tokens: 0, piece: null, end: 0 });
    const begun = performance.now(), total = this.steps.reduce((sum, step) => sum + step.tokens.length, 0);
    return new Promise((resolve) => {
      const frame = () => {
        const now = signal.aborted ? Infinity : (performance.now() - begun) / 1000;
        const due = this.times.findIndex((time) => time > now);
        this.write(due < 0 ? this.steps.length : due);
        const over = this.written === this.steps.length;
        this.show(over ? this.wall : Math.min(now, longest), total, over ? this.report?.tokens_per_second : undefined);
        if (over) resolve();
        else requestAnimationFrame(frame);
      };
      frame();
    });
  }
}

const lanes = [new Lane("plain"), new Lane("speculative")];
let shownLane = null;

const prompt = (messages) =>
  card.chat ? { messages } : { prompt: messages.map((message) => message.content).join("\n") };

function settingsOf(lane) {
  const tree = $("tree-shape").value.replaceAll(" ", "");
  const speculative = {
    mode: $("mode").value,
    ...($("drafter").value && { drafter: $("drafter").value }),
    ...(Number($("depth").value) && { depth: Number($("depth").value) }),
    ...(tree && { tree }),
  };
  const predicted = $("prediction").value;
  return {
    temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value),
    seed: Number($("seed").value),
    speculative_decoding: { ...(lane.name === "plain" ? { drafter: "none" } : speculative), steps: true },
    ...(predicted && { prediction: { type: "content", content: predicted } }),
  };
}

async function race() {
  const text = $("prompt").value.trim();
  if (!text || running || !card) return;
  const before = lanes.map((lane) => lane.messages.length);
  const whole = await perform((signal) => bothLanes(text, signal));
  if (whole) $("prompt").value = "";
  // A turn that ended early is shown, but later turns do not build on it: the lanes would differ.
  else lanes.forEach((lane, i) => lane.messages.splice(before[i]));
}

async function bothLanes(text, signal) {
  for (const lane of lanes) lane.ask(text);
  $("verdict").replaceChildren(...(warm ? [] : ["Warming up."]));
  for (const lane of warm ? [] : lanes) await lane.warmUp(settingsOf(lane), signal);
  warm = true;
  $("verdict").replaceChildren();
  const before = await load();
  if ($("order").value === "together") await Promise.all(lanes.map((lane) => lane.run(settingsOf(lane), signal)));
  else for (const lane of lanes) await lane.run(settingsOf(lane), signal);
  others = coresBetween(before, await load());
  conclude();
}

// A proxy may hide these figures.
const load = () => readLive().catch(() => null);

// Cores that other programs used between two snapshots; null where that is not known.
function coresBetween(before, after) {
  if (!before || !after || before.other_programs_seconds === null) return null;
  return (after.other_programs_seconds - before.other_programs_seconds) / (after.time - before.time);
}

// Runs something that Stop aborts. Returns whether it came to its end.
async function perform(work) {
  running = new AbortController();
  busy(true);
  complain("");
  try {
    await work(running.signal);
    return true;
  } catch (problem) {
    if (problem.name !== "AbortError") complain(problem.message);
    $("verdict").replaceChildren(el("span", {}, problem.name === "AbortError" ? "Stopped." : "The race ended early."));
    return false;
  } finally {
    running = null;
    busy(false);
  }
}

function busy(now) {
  $("go").disabled = $("fresh").disabled = now;
  $("stop").disabled = !now;
  $("replay").disabled = now || !lanes.every((lane) => lane.report);
  document.body.classList.toggle("busy", now);
}

// What the race showed. Times are the engine's own, from the first token to the last.
function conclude() {
  const [plain, speculative] = lanes;
  const same = plain.text === speculative.text;
  const ratio = plain.report.generation_time_ms / speculative.report.generation_time_ms;
  const exact = $("mode").value === "coupled";
  const words = same
    ? `The same ${speculative.tokens} tokens`
    : exact ? "The texts differ, and must not: please report it" : `The texts differ, as ${$("mode").value} mode allows`;
  const drafted = speculative.steps.some((step) => step.draft.tokens.length);
  const effort = drafted
    ? `${speculative.steps.length} passes instead of ${plain.steps.length}`
    : "without drafts: the planner expected none to pay";
  const shared = $("order").value === "together" ? " The two shared steps, so this is not the speed of either alone." : "";
  const disturbed = others > BUSY ? ` Other programs used ${number(others)} cores meanwhile, so the times say little.` : "";
  const look = disturbed ? "unsure" : ratio >= 1 ? "won" : "lost";
  $("verdict").replaceChildren(
    ...(same && drafted && isFinite(ratio) ? [el("b", { class: look }, `${disturbed ? "about " : ""}${number(ratio, disturbed ? 1 : 2)}×`)] : []),
    el("span", { "data-same": String(same) }, `${words}, ${effort}.${shared}${disturbed}`));
  // The step with the most to see.
  const sizes = speculative.steps.map((step) => 64 * step.accepted.length + step.draft.tokens.length);
  if (sizes.length) speculative.select(sizes.indexOf(Math.max(...sizes)));
}

export function serve(served, report) {
  if (card && card.id !== served.id && !running) fresh();
  warm &&= card?.id === served.id;
  card = served;
  complain = report;
  if (!seen.size) drawLegend($("legend"), explained());
  const chosen = $("drafter").value;
  const names = ["", ...card.drafters, "none"];
  $("drafter").replaceChildren(...names.map((name) => el("option", { value: name, selected: name === chosen }, name || `auto (${card.drafter ?? "none"})`)));
  $("go").disabled = card.max_model_len === null;
  $("tokens").max = card.max_model_len ?? "";
}

export const enter = async () => {};

$("ask").addEventListener("submit", (event) => { event.preventDefault(); race(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
$("replay").addEventListener("click", () => perform(async (signal) => {
  const longest = Math.max(...lanes.map((lane) => lane.wall));
  await Promise.all(lanes.map((lane) => lane.replay(signal, longest)));
  conclude();
}));
$("fresh").addEventListener("click", fresh);

// Kinds of tokens to expect, for the legend before the first answer.
const explained = () => (card.drafters.length ? [`accepted:${card.drafter}`, "recovered", "bonus", "plain"] : ["plain"]);
const untold = $("why").textContent;

function fresh() {
  for (const lane of lanes) Object.assign(lane, { report: null }).reset();
  seen.clear();
  drawLegend($("legend"), explained());
  $("verdict").replaceChildren();
  $("tree").replaceChildren();
  $("why").textContent = untold;
  busy(false);
}

$("examples").append(...Object.entries(EXAMPLES).map(([name, text]) => {
  const chip = el("button", { type: "button", class: "chip" }, name);
  chip.addEventListener("click", () => { $("prompt").value = text; $("prompt").focus(); });
  return chip;
}));
$("prompt").value = EXAMPLES.Edit;
for (const name of ["depth", "temperature"]) {
  $(name).addEventListener("input", () => { $(`${name}-shown`).textContent = name === "depth" && $(name).value === "0" ? "auto" : $(name).value; });
}
$("order").addEventListener("change", () => {
  $("order-hint").textContent = $("order").value === "turns"
    ? "In turn: each request has the engine to itself, so the figures are its own."
    : "At the same time: both requests share the engine's steps, so neither figure is that of a request alone.";
});
if (matchMedia("(max-width: 900px)").matches) $("options").open = false;
