// The page: one prompt, its answer or a race of two, the steps that made it, the server's load.

import { Trouble, stream } from "./api.js";
import { byId, element, say } from "./dom.js";
import { count, figure, sentence } from "./format.js";
import { Lane } from "./lane.js";
import { Load } from "./load.js";
import { built, parsed } from "./markdown.js";
import { race, table, verdict } from "./race.js";
import { Invalid, complain, followChoices, forgive, mode, number, request } from "./settings.js";
import { showLegend } from "./sources.js";
import { Steps } from "./steps.js";
import { followTheme } from "./theme.js";

const SEEDS = 2 ** 31;
// Drawing takes time from a server on the same machine, so it has pauses: of at least so many
// milliseconds, and so many times as long as the last drawing took.
const PAUSE = 80;
const REST = 9;
const steps = new Steps();
const load = new Load(key, learn);
let server = null; // its state, once it has answered
let turns = []; // messages of the conversation so far
let last = null; // {prompt, turns, mode}: what was asked last, and what had been said before it
let controller = null; // of what is running
let retry = null; // does again what failed
let lanes = []; // that are shown
let view = null; // what is shown with them: {title, asked, before, completion, said, result}
let hidden = null; // the lanes and the view that gave way to these, as long as these have no text
let drawing = null; // the timer of the next drawing
let effort = 0; // milliseconds that the last one took

/** The method that others race against. */
function plain() {
  return server?.plain ?? "plain";
}

function key() {
  return byId("key").value.trim();
}

// --- one thing at a time

/** Runs a task that may be stopped; whatever goes wrong is said where it belongs. */
async function run(task) {
  if (controller) return;
  controller = new AbortController();
  hidden = null;
  retry = () => run(task);
  forgive();
  byId("trouble").hidden = true;
  byId("said").textContent = "Generating";
  showButtons();
  try {
    byId("said").textContent = await task(controller.signal);
  } catch (error) {
    controller.abort(); // what else runs for the same task
    if (hidden && !lanes.some(({ words }) => words)) show(...hidden);
    byId("said").textContent = "";
    tell(error);
  } finally {
    controller = null;
    showButtons();
    load.ask();
  }
}

/** Says a trouble beside its field, or above the answer. What nobody foresaw is raised again. */
function tell(error) {
  const ours = error instanceof Trouble || error instanceof Invalid;
  if (ours && complain(error.field, error.message)) return;
  byId("trouble").querySelector("p").textContent = ours
    ? error.message
    : `This page failed: ${error.message}.`;
  byId("trouble").hidden = false;
  if (!ours) throw error;
}

function stop() {
  controller?.abort();
}

function showButtons() {
  const idle = !controller;
  const able = { send: idle, race: idle, again: idle && last, halt: !idle };
  for (const [id, is] of Object.entries(able)) {
    byId(id).setAttribute("aria-disabled", String(!is));
  }
}

// --- answers

/** Asks and shows the answer in the lane while it comes. Raises Trouble. */
async function answer(lane, { path, body }, signal) {
  lane.begin(body.prompt);
  try {
    for await (const chunk of stream(path, body, key(), signal)) {
      lane.take(chunk);
      paint(lane);
    }
  } catch (error) {
    lane.end("broken");
    throw error;
  } finally {
    if (lane.reason !== "broken") lane.end(signal.aborted ? "stopped" : null);
    refresh();
  }
  return lane;
}

/** Draws text, figures and steps soon, however many chunks come meanwhile. */
function paint(lane) {
  lane.stale = true;
  drawing ??= setTimeout(refresh, Math.max(PAUSE, REST * effort));
}

function refresh() {
  const began = performance.now();
  clearTimeout(drawing);
  drawing = null;
  for (const lane of lanes.filter((lane) => lane.stale)) {
    lane.show();
    lane.stale = false;
  }
  steps.show();
  showLegend(byId("legend"), lanes.at(-1)?.counts ?? new Map());
  effort = performance.now() - began;
}

/** Shows lanes, and what stands around them; what was shown comes back if no text comes. */
function showLanes(title, asked, before, said, ...shown) {
  hidden = [lanes, view];
  show(shown, { title, asked, before, said, completion: mode() === "text", result: [] });
}

function show(shown, around) {
  [lanes, view] = [shown, around];
  byId("result").hidden = !view;
  showTurns(view?.before ?? []);
  if (view) {
    byId("result-title").textContent = view.title;
    say(byId("asked"), view.completion ? "" : view.asked);
    byId("lanes").replaceChildren(...lanes.map((lane) => lane.root));
    byId("result").classList.toggle("racing", lanes.length > 1);
    byId("result").classList.toggle("completion", view.completion);
    byId("formatting").hidden = view.completion;
    say(byId("race-said"), view.said);
    byId("race-result").replaceChildren(...view.result);
    byId("race-result").hidden = !view.result.length;
  }
  steps.watch(lanes.at(-1) ?? null);
  refresh();
}

function newLane(title, onStep) {
  return new Lane(title, onStep, mode() === "chat" && byId("formatted").checked);
}

/** The request for a prompt. Raises Invalid. */
function asking(prompt, before) {
  if (!prompt) throw new Invalid("prompt", "Write a prompt first.");
  return request(prompt, before);
}

function send() {
  const typed = byId("prompt").value;
  return run((signal) => one(typed, turns, signal));
}

function again() {
  if (last) run((signal) => one(last.prompt, last.turns, signal));
}

/** One answer. Returns what to announce. */
async function one(prompt, before, signal) {
  const ask = asking(prompt, before);
  const lane = newLane(ask.body.method ?? "the server’s method", (i) => steps.choose(i));
  showLanes("Answer", prompt, before, "", lane);
  await answer(lane, ask, signal);
  last = { prompt, turns: before };
  if (mode() === "chat") {
    turns = [
      ...before,
      { role: "user", content: prompt },
      { role: "assistant", content: lane.words },
    ];
    if (byId("prompt").value === prompt) byId("prompt").value = "";
    showConversation();
  }
  const how = signal.aborted ? "Stopped" : "Done";
  return `${how}: ${count(lane.tokens, "token")}, ${figure(lane.speed)} tokens a second`;
}

/** A race of what is typed or, where nothing is, of what was asked last. */
function compete() {
  const typed = byId("prompt").value;
  const [prompt, before] = typed || !last ? [typed, turns] : [last.prompt, last.turns];
  return run((signal) => both(prompt, before, signal));
}

async function both(prompt, before, signal) {
  const rounds = number("rounds") ?? 1;
  const together = byId("order").value === "together";
  const ask = asking(prompt, before);
  const fast = ask.body.method ?? "the server’s method";
  const base = plain();
  if (fast === base) {
    throw new Invalid("method", `Choose another method to race against ${base}.`);
  }
  // With draws, only one seed for both can give the same text.
  if (ask.body.temperature !== 0) ask.body.seed ??= Math.floor(SEEDS * Math.random());
  const current = { plain: null, fast: null };
  const done = await race(
    rounds,
    together,
    async (which) => {
      const body = which === "plain" ? { ...ask.body, method: base } : ask.body;
      await answer(current[which], { path: ask.path, body }, signal);
      return signal.aborted ? null : current[which];
    },
    (round, first) => {
      current.plain = newLane(base);
      current.fast = newLane(fast, (i) => steps.choose(i));
      const names = { plain: base, fast };
      const who = first ? `one by one, ${names[first]} first` : "both at once, sharing the machine";
      const said = `Round ${round} of ${rounds}: ${who}.`;
      showLanes("Race", prompt, before, said, current.plain, current.fast);
    },
  );
  if (!done.length) return "Stopped";
  const said = `${fast}: ${verdict(done)}`;
  view.result = [element("p", { className: "verdict" }, said), table(done, fast)];
  byId("race-result").replaceChildren(...view.result);
  byId("race-result").hidden = false;
  return said;
}

// --- the conversation

function showTurns(shown) {
  byId("earlier").hidden = !shown.length;
  byId("turns").replaceChildren(
    ...shown.map(({ role, content }) =>
      element(
        "div",
        { className: `turn ${role}` },
        element("b", {}, role === "user" ? "You" : "Model"),
        said(content, role === "assistant" && byId("formatted").checked),
      ),
    ),
  );
}

/** What was said: as it was written, or its Markdown as what it means. */
function said(text, formatted) {
  if (!formatted) return element("span", {}, text);
  const leaf = (from, to) => [text.slice(from, to)];
  return element("div", { className: "markdown" }, ...built(parsed(text), leaf));
}

function showConversation() {
  const said = turns.length / 2;
  const shown = mode() === "chat" && said > 0;
  say(byId("conversation"), shown ? `Turn ${said + 1}` : "");
  byId("anew").hidden = !shown;
}

function beginAnew() {
  turns = [];
  last = null;
  showTurns([]);
  showConversation();
  showButtons();
  byId("prompt").focus();
}

// --- what the server says of itself

function learn(state) {
  if (!server) {
    const names = ["auto", ...state.methods.map(({ name }) => name)];
    byId("methods").replaceChildren(...names.map((value) => element("option", { value })));
  }
  server = state;
  byId("model").textContent = state.model;
  byId("method").placeholder = state.method;
  byId("race").textContent = `Race against ${plain()}`;
  showGuarantee();
}

function showGuarantee() {
  const method = byId("method").value.trim();
  const known = server?.methods.find(({ name }) => name === method);
  say(byId("guarantee"), known && `${sentence(known.summary)} Guarantee: ${known.guarantee}.`);
}

// --- wiring

followTheme(byId("theme"));
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("form").addEventListener("change", () => {
  followChoices();
  showConversation();
});
byId("formatted").addEventListener("change", ({ target }) => {
  for (const lane of view.completion ? [] : lanes) lane.format(target.checked);
  showTurns(view.before);
});
byId("method").addEventListener("input", showGuarantee);
byId("key").addEventListener("change", () => load.ask());
byId("halt").addEventListener("click", stop);
byId("again").addEventListener("click", again);
byId("race").addEventListener("click", compete);
byId("retry").addEventListener("click", () => retry?.());
byId("anew").addEventListener("click", beginAnew);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("form").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing) return;
  const whole = event.ctrlKey || event.metaKey;
  const inPrompt = event.target === byId("prompt");
  if (whole || (inPrompt && mode() === "chat" && !event.shiftKey)) {
    event.preventDefault();
    send();
  } else if (event.target instanceof HTMLInputElement) {
    event.preventDefault(); // Enter in a setting sends nothing by accident
  }
});
byId("settings").open = matchMedia("(min-width: 861px)").matches; // the style sheet's own limit
followChoices();
showButtons();
load.ask();
