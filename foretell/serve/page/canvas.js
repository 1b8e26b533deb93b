// A canvas while it is filled: what stands behind the text that is final, position by position.

import { element } from "./dom.js";
import { percent, visible } from "./format.js";

export class Canvas {
  constructor() {
    this.cells = []; // of every position its text, null where it is masked
    this.fresh = new Set(); // positions that the last step filled
    this.back = new Set(); // and those that it masked again
    this.steps = -1; // the first message tells of the empty canvas
    this.root = element("span", { className: "canvas" });
  }

  /** placed: [position, text or null] of each position that changed; length: of the canvas */
  take(placed, length) {
    this.steps += 1;
    while (this.cells.length < length) this.cells.push(null);
    this.cells.length = length;
    this.fresh.clear();
    this.back.clear();
    for (const [position, text] of placed) {
      this.cells[position] = text;
      (text === null ? this.back : this.fresh).add(position);
    }
  }

  get filled() {
    return this.cells.filter((text) => text !== null).length;
  }

  get share() {
    return percent(this.filled, this.cells.length);
  }

  get perStep() {
    return this.steps > 0 ? this.filled / this.steps : null;
  }

  /** The positions from `first` on, drawn anew. */
  draw(first) {
    const cells = this.cells.slice(first).map((text, i) => this.#cell(text, first + i));
    this.root.setAttribute("aria-label", `${this.cells.length - this.filled} positions are open`);
    this.root.replaceChildren(...cells);
    return this.root;
  }

  #cell(text, position) {
    if (text === null) {
      const className = this.back.has(position) ? "cell mask back" : "cell mask";
      return element("span", { className, title: `position ${position + 1}, open` });
    }
    const className = this.fresh.has(position) ? "cell fresh" : "cell";
    const title = `position ${position + 1}, not final yet`;
    return element("span", { className, title }, text === "" ? visible(text) : text);
  }
}
