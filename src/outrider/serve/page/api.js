// Requests to the server. The key is in this module's memory and nowhere else.

import { $ } from "./dom.js";

let key = "";
let model = ""; // of the requests; "": the server's first
let asking = null; // the dialog's promise: several requests wait for one answer

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-wrong").textContent = wrong ? "The server refused this key." : "";
    $("key").value = "";
    dialog.addEventListener("close", () => {
      key = $("key").value;
      $("key").value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

// In place of the browser's own words for a failed connection. A request that was stopped is no failure.
const unless = (signal, message) => (problem) => {
  throw signal?.aborted ? problem : new Refused(0, message);
};

// The response to a request that the server accepts. Asks for a key as often as one is refused.
export async function send(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { accept: "application/json", ...options.headers, ...(used ? { authorization: `Bearer ${used}` } : {}) };
    const response = await fetch(path, { ...options, headers }).catch(unless(options.signal, "The server does not answer."));
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    if (response.status !== 401) throw new Refused(response.status, body.error?.message ?? `status ${response.status}`);
    if (used === key) await askForKey(used !== "");
  }
}

export const read = async (path) => (await send(path)).json();

export const choose = (name) => { model = name; };
export const readLive = () => read(model ? `/v1/live?model=${encodeURIComponent(model)}` : "/v1/live");

export async function post(path, body) {
  const headers = { "content-type": "application/json" };
  return send(path, { method: "POST", headers, body: JSON.stringify(body) });
}

const SLICE = 25; // milliseconds of events before the page gets a turn: half of what browsers call a long task
const turn = () => new Promise((go) => setTimeout(go));

// Events of a streamed answer, as they come. While more of the answer has arrived already, reading it never leaves this
// task: without turns for the page, a fast answer on a busy machine would hold up its own drawing, and Stop.
export async function* stream(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await send(path, { method: "POST", headers, body: JSON.stringify({ ...body, ...(model ? { model } : {}), stream: true }), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const lost = "The connection to the server was lost before the answer ended.";
  for (let held = "", begun = performance.now(); ; ) {
    const { value, done } = await reader.read().catch(unless(signal, lost));
    if (done) throw new Refused(0, lost);
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Refused(0, event.error.message);
      yield event;
      if (performance.now() - begun < SLICE) continue;
      await turn();
      begun = performance.now();
    }
  }
}
