// One answer while it is made: its text token by token, its steps, its figures.

import { Canvas } from "./canvas.js";
import { element } from "./dom.js";
import { figure, percent } from "./format.js";
import { built, isMarked, parsed } from "./markdown.js";
import { TARGET, look, spoken } from "./sources.js";

const REASONS = {
  stop: "ended by itself",
  length: "ended at the limit of tokens",
  timeout: "ended at its deadline",
  stopped: "stopped",
  broken: "broke off",
};
const NEAR = 40; // pixels from the end of the text within which it follows what comes

export class Lane {
  /**
   * title: the heading of the answer, such as a method; onStep(i): a token of step i was chosen;
   * formatted: whether its Markdown is shown as what it means, once it is whole
   */
  constructor(title, onStep = () => {}, formatted = false) {
    this.title = title;
    this.formatted = formatted;
    this.pieces = []; // {end, source, step} of each part of the text, end: in letters
    this.prefix = "";
    this.whole = false; // whether nothing more comes
    this.steps = []; // {tree, parts, sources}
    this.counts = new Map(); // source -> tokens
    this.words = ""; // the text so far
    this.fresh = new DocumentFragment(); // tokens that are not in the text yet
    this.marked = null; // the step whose tokens are marked in the text
    this.tokens = 0;
    this.drafted = 0;
    this.accepted = 0;
    this.began = this.first = this.last = null; // milliseconds
    this.firstTokens = 0; // that came with the first step
    this.summary = null; // the server's figures, at the end
    this.canvas = null; // what stands behind the text, where the model fills a canvas
    this.reason = null;
    this.heading = element("h3", {}, title);
    this.guarantee = element("span", { className: "badge", hidden: true });
    this.text = element("div", { className: "text", tabIndex: 0 });
    this.text.setAttribute("role", "log");
    this.text.setAttribute("aria-label", `Text: ${title}`);
    this.figures = element("dl", { className: "figures" });
    this.root = element(
      "article",
      { className: "lane" },
      element("div", { className: "row" }, this.heading, this.guarantee),
      this.text,
      this.figures,
    );
    this.text.append(element("span", { className: "soft waits" }, "waits for its turn"));
    this.text.addEventListener("click", (event) => {
      const { step } = event.target.dataset ?? {};
      if (step !== undefined) onStep(Number(step));
    });
  }

  /** prefix: what the answer continues, shown before it */
  begin(prefix = "") {
    this.began = performance.now();
    this.prefix = prefix;
    this.text.setAttribute("aria-busy", "true");
    this.#lay();
    this.show();
  }

  /** Takes in one chunk of a stream, of either API. */
  take(chunk) {
    const choice = chunk.choices?.[0];
    const text = choice?.text ?? choice?.delta?.content ?? "";
    const extra = chunk.foretell;
    if (extra?.placed) {
      this.canvas ??= new Canvas();
      this.canvas.take(extra.placed, extra.length);
    }
    if (extra?.parts?.length) this.#step(text, extra);
    else this.#append(text);
    if (extra?.method) this.summary = extra;
    if (choice?.finish_reason) this.reason = choice.finish_reason;
  }

  #step(text, { parts, sources, tree }) {
    const now = performance.now();
    if (this.first === null) {
      this.first = now;
      this.firstTokens = parts.length;
    }
    this.last = now;
    this.steps.push({ tree, parts, sources });
    this.tokens += parts.length;
    if (tree) {
      this.drafted += tree.parents.filter((parent) => parent >= 0).length;
      this.accepted += tree.accepted.filter((node) => tree.parents[node] >= 0).length;
    }
    parts.forEach((part, i) => {
      this.counts.set(sources[i], (this.counts.get(sources[i]) ?? 0) + 1);
      this.#append(part, sources[i]);
    });
    // Text that was held back until the end belongs to no token in particular.
    this.#append(text.slice(parts.join("").length));
  }

  /** source: who proposed the text; null where that is not known */
  #append(text, source = null) {
    if (!text) return;
    const from = this.words.length;
    this.words += text;
    const step = this.steps.length - 1;
    this.pieces.push({ end: this.words.length, source, step });
    this.fresh.append(...this.#tokens(from, this.words.length));
  }

  /** A part of the text as elements, one for each token in it. */
  #tokens(from, to) {
    let low = 0; // the first piece that ends behind `from`
    for (let high = this.pieces.length; low < high; ) {
      const middle = (low + high) >> 1;
      if (this.pieces[middle].end > from) high = middle;
      else low = middle + 1;
    }
    const made = [];
    for (let at = from; at < to && low < this.pieces.length; low += 1) {
      const { end, source, step } = this.pieces[low];
      const part = this.words.slice(at, Math.min(end, to));
      const token = element("span", { className: `token ${look(source ?? TARGET)}` }, part);
      if (source !== null) {
        token.dataset.step = step;
        token.title = `proposed by ${spoken(source)}, step ${step + 1}`;
      }
      made.push(token);
      at = end;
    }
    return made;
  }

  /** Shows Markdown as what it means, or as it was written. */
  format(formatted) {
    this.formatted = formatted;
    this.#lay();
    this.#flush();
  }

  /** Lays the text out anew, as Markdown where it is whole and has some. */
  #lay() {
    this.fresh.replaceChildren();
    const nodes = this.formatted && this.whole ? parsed(this.words) : [];
    const formatted = isMarked(nodes);
    this.text.classList.toggle("markdown", formatted);
    this.text.replaceChildren();
    if (this.prefix) this.text.append(element("span", { className: "soft" }, this.prefix));
    const leaf = (from, to) => this.#tokens(from, to);
    if (formatted) this.text.append(...built(nodes, leaf));
    else this.text.append(...leaf(0, this.words.length));
    const marked = this.marked;
    this.marked = null;
    this.mark(marked);
  }

  /** Puts what has come into the text, which is laid out anew once rather than for every token. */
  #flush() {
    const { scrollTop, clientHeight, scrollHeight } = this.text;
    const follows = scrollTop + clientHeight > scrollHeight - NEAR;
    this.text.append(this.fresh);
    if (this.canvas) {
      if (this.reason) this.canvas.root.remove(); // what is behind the end is no part of the text
      else this.text.append(this.canvas.draw(this.tokens));
    }
    if (follows) this.text.scrollTop = this.text.scrollHeight;
  }

  /** reason: "stopped" or "broken" where the server gave none */
  end(reason = null) {
    this.reason = reason ?? this.reason;
    this.whole = true;
    this.text.setAttribute("aria-busy", "false");
    if (this.formatted) this.#lay();
    this.show();
  }

  /** Marks the tokens of one step in the text; null: of none. */
  mark(step) {
    if (step === this.marked) return;
    this.marked = step;
    for (const token of this.text.querySelectorAll(".token.marked")) {
      token.classList.remove("marked");
    }
    for (const token of this.text.querySelectorAll(`.token[data-step="${step}"]`)) {
      token.classList.add("marked");
    }
  }

  /** Tokens a second after the first step, of a canvas from the beginning, since its first tokens
   * may be final last; null as long as there is nothing to measure.
   */
  get speed() {
    if (this.canvas) {
      return this.tokens && this.last ? (1000 * this.tokens) / (this.last - this.began) : null;
    }
    const tokens = this.tokens - this.firstTokens;
    return tokens > 0 && this.last > this.first ? (1000 * tokens) / (this.last - this.first) : null;
  }

  get perStep() {
    if (this.canvas) return this.summary?.tokens_per_step ?? this.canvas.perStep;
    const own = this.steps.length ? this.tokens / this.steps.length : null;
    return this.summary?.tokens_per_step ?? own;
  }

  /** Brings text and figures up to date. */
  show() {
    this.#flush();
    const drafted = this.summary?.drafted ?? this.drafted;
    const accepted = this.summary?.accepted ?? this.accepted;
    const wait = this.first === null ? null : (this.first - this.began) / 1000;
    const rows = [
      [
        "tokens/s",
        figure(this.speed),
        this.canvas ? "Final tokens a second" : "Tokens a second after the first step",
      ],
      ["tokens a step", figure(this.perStep), "Plain decoding has 1"],
      this.canvas
        ? ["filled", this.canvas.share, "Positions of the canvas that have a token"]
        : [
            "drafts accepted",
            percent(accepted, drafted),
            `${accepted} of ${drafted} drafted tokens`,
          ],
      ["tokens", this.tokens.toLocaleString("en"), "Tokens of the answer so far"],
      ["s to the first", figure(wait), "Seconds from the request to the first token"],
    ];
    this.figures.replaceChildren(
      ...rows.map(([name, value, title]) =>
        element("div", { title }, element("dd", {}, value), element("dt", {}, name)),
      ),
    );
    const { method, guarantee } = this.summary ?? {};
    const known = !method || method === this.title;
    this.heading.textContent = known ? this.title : `${this.title}: ${method}`;
    const end = this.reason ? (REASONS[this.reason] ?? this.reason) : "";
    this.guarantee.textContent = [guarantee, end].filter(Boolean).join(" · ");
    this.guarantee.hidden = !this.guarantee.textContent;
  }
}
