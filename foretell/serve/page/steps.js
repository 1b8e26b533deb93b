// The steps of an answer: a strip of all, and the token tree of one of them.

import { byId, drawn } from "./dom.js";
import { described, drawTree } from "./tree.js";

const BAR = 6; // pixels of a step in the strip
const HIGH = 34; // of the strip

export class Steps {
  constructor() {
    this.card = byId("steps");
    this.slider = byId("step");
    this.follow = byId("follow");
    this.lane = null;
    this.slider.addEventListener("input", () => {
      this.follow.checked = false;
      this.show();
    });
    this.follow.addEventListener("change", () => this.show());
  }

  /** From now on the steps of this lane are shown. */
  watch(lane) {
    this.lane = lane; // null: none
    this.follow.checked = true;
    this.show();
  }

  /** Shows step i, counted from 0, and stays there. */
  choose(i) {
    this.follow.checked = false;
    this.slider.value = i + 1;
    this.show();
  }

  show() {
    const steps = this.lane?.canvas ? [] : (this.lane?.steps ?? []); // a canvas has no trees
    this.card.hidden = !steps.length;
    if (!steps.length) return;
    this.slider.max = steps.length;
    if (this.follow.checked) this.slider.value = steps.length;
    const i = Number(this.slider.value) - 1;
    byId("step-number").textContent = `${i + 1} of ${steps.length}`;
    this.slider.setAttribute("aria-valuetext", `step ${i + 1}: ${described(steps[i])}`);
    byId("step-said").textContent = described(steps[i]);
    drawTree(byId("tree"), steps[i]);
    drawStrip(byId("strip"), steps, i);
    this.lane.mark(this.follow.checked ? null : i);
  }
}

/** A column a step: the outline is what was drafted, what is filled was added to the text. */
function drawStrip(svg, steps, chosen) {
  const width = svg.clientWidth;
  const fitting = Math.floor(width / BAR);
  const from = Math.max(0, Math.min(steps.length - fitting, chosen - Math.floor(fitting / 2)));
  const shown = steps.slice(from, from + fitting);
  const drafts = shown.map(({ tree }) => (tree ? tree.tokens.length : 1));
  const top = Math.max(4, ...drafts, ...shown.map(({ parts }) => parts.length));
  const unit = HIGH / top;
  const columns = shown.map(({ parts }, i) => {
    const place = { x: i * BAR, width: BAR - 1.5 };
    const high = drafts[i] * unit;
    const added = parts.length * unit;
    return drawn(
      "g",
      { class: from + i === chosen ? "chosen" : "" },
      drawn("rect", { class: "tried", ...place, y: HIGH - high, height: high }),
      drawn("rect", { class: "added", ...place, y: HIGH - added, height: added }),
    );
  });
  svg.replaceChildren(...columns);
  svg.setAttribute("viewBox", `0 0 ${width} ${HIGH}`);
  svg.setAttribute(
    "aria-label",
    `Tokens added by each of ${shown.length} steps, beside what was computed for them`,
  );
}
