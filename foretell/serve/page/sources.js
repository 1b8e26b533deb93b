// Who proposed a token: every drafter has a colour and an underline of its own.

import { element } from "./dom.js";
import { count, percent } from "./format.js";

export const TARGET = "target"; // the model itself
export const UNDERLINES = ["solid", "dashed", "dotted", "double", "wavy"];
const COLOURS = 5; // of the style sheet, .c0 to .c4
const seen = new Map(); // source -> its number, in the order of appearance

function number(source) {
  if (!seen.has(source)) seen.set(source, seen.size);
  return seen.get(source);
}

/** The underline of a source: no two of the first 25 share both colour and underline. */
export function underline(source) {
  const i = number(source);
  return UNDERLINES[(i + Math.floor(i / COLOURS)) % UNDERLINES.length];
}

/** The classes that draw a source's tokens; the model's own stay as they are. */
export function look(source) {
  if (source === TARGET) return "own";
  return `drafted c${number(source) % COLOURS} ${underline(source)}`;
}

export function spoken(source) {
  return source === TARGET ? "the model itself" : source;
}

/** Shows for every source of `counts` (source -> tokens) its look, its tokens and their share. */
export function showLegend(list, counts) {
  const total = [...counts.values()].reduce((sum, tokens) => sum + tokens, 0);
  const entries = [...counts].sort(([a], [b]) => (b === TARGET) - (a === TARGET));
  list.replaceChildren(
    ...entries.map(([source, tokens]) =>
      element(
        "li",
        {},
        element("span", { className: `token ${look(source)}` }, spoken(source)),
        element(
          "span",
          { className: "soft" },
          ` ${count(tokens, "token")}, ${percent(tokens, total)}`,
        ),
      ),
    ),
  );
}
