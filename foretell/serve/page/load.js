// What the server is doing, asked every two seconds while the page is seen.

import { status } from "./api.js";
import { byId, drawn, element, say } from "./dom.js";
import { bytes, figure, percent } from "./format.js";

const EVERY = 2000; // milliseconds
const AFTER_TROUBLE = 8000;
const COLUMN = 14; // pixels of a position in the chart of acceptance
const HIGH = 40;

export class Load {
  /** key(): the API key to ask with; onState(state): told what the server answered */
  constructor(key, onState) {
    this.key = key;
    this.onState = onState;
    this.last = null; // {time, tokens}
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.ask());
  }

  /** Asks now, and goes on asking. */
  async ask() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    let pause = EVERY;
    try {
      this.#show(await status(this.key()));
      say(byId("load-trouble"), "");
    } catch (error) {
      pause = AFTER_TROUBLE;
      this.last = null;
      say(byId("load-trouble"), error.message);
      byId("load-figures").replaceChildren();
      byId("by-position").hidden = true;
      byId("busy").textContent = "";
    }
    clearTimeout(this.timer); // of another call that ran meanwhile
    this.timer = setTimeout(() => this.ask(), pause);
  }

  #show(state) {
    const now = performance.now();
    const tokens = state.generation_tokens;
    const speed = this.last && (1000 * (tokens - this.last.tokens)) / (now - this.last.time);
    this.last = { time: now, tokens };
    const rows = [
      ["Running", figureOf(state.running)],
      ["Waiting", figureOf(state.waiting)],
      ["Tokens/s, all requests", figure(speed)],
      ["Drafts accepted", percent(state.accepted, state.drafted)],
      ["Prompts reused", percent(state.prefix_tokens_reused, state.prefix_tokens_asked)],
      ["Caches", cacheOf(state)],
      ["Preempted", figureOf(state.preempted)],
    ];
    byId("load-figures").replaceChildren(
      ...rows.map(([name, value]) =>
        element("div", {}, element("dt", {}, name), element("dd", {}, value)),
      ),
    );
    drawPositions(byId("positions"), state.accepted_per_position ?? [], state.drafts);
    byId("busy").textContent = `${state.running} running, ${state.waiting} waiting`;
    this.onState(state);
  }
}

const figureOf = (number) => (number ?? 0).toLocaleString("en");

function cacheOf({ cache_bytes: used, cache_limit: limit }) {
  if (!limit) return bytes(used ?? 0);
  const meter = element("meter", { min: 0, max: limit, value: used });
  meter.setAttribute("aria-label", "Share of the caches in use");
  return element("span", {}, `${bytes(used)} of ${bytes(limit)} `, meter);
}

/** A column a position in a draft: the share of drafts accepted at least so far. */
function drawPositions(svg, accepted, drafts) {
  const shown = drafts ? accepted.slice(0, 16) : [];
  byId("by-position").hidden = !shown.length;
  const shares = shown.map((number) => number / drafts);
  svg.replaceChildren(
    ...shares.flatMap((share, i) => {
      const place = { x: i * COLUMN, width: COLUMN - 3 };
      return [
        drawn("rect", { class: "tried", ...place, y: 0, height: HIGH }),
        drawn("rect", { class: "added", ...place, y: HIGH * (1 - share), height: HIGH * share }),
      ];
    }),
  );
  svg.setAttribute("viewBox", `0 0 ${16 * COLUMN} ${HIGH}`);
  const list = shares.map((share) => percent(share, 1)).join(", ");
  svg.setAttribute("aria-label", `Of drafts: ${list}`);
  svg.append(drawn("title", {}, list));
}
