// Plain against accelerated decoding: the same request twice a round, and what came of it.

import { element } from "./dom.js";
import { count, figure } from "./format.js";

let plainFirst = true; // in the next round

/**
 * Runs the rounds. `run(which)` makes one answer, "plain" or "fast", and returns its lane once it
 * is finished, or null if it was stopped. Returns the finished rounds: {first, plain, fast}.
 * `onRound(rounds, first)` is told before each round who goes first, null where they run at once.
 */
export async function race(rounds, together, run, onRound) {
  const done = [];
  for (let i = 0; i < rounds; i += 1) {
    const order = plainFirst ? ["plain", "fast"] : ["fast", "plain"];
    onRound(i + 1, together ? null : order[0]);
    const lanes = {};
    if (together) {
      const both = await Promise.all(order.map(run));
      order.forEach((which, k) => (lanes[which] = both[k]));
    } else {
      for (const which of order) {
        lanes[which] = await run(which);
        if (!lanes[which]) return done;
      }
    }
    if (!lanes.plain || !lanes.fast) return done;
    plainFirst = !plainFirst;
    done.push({ first: together ? null : order[0], ...lanes });
  }
  return done;
}

/** How many times as fast as plain a round was, null where an answer is too short to say. */
export function ratio({ plain, fast }) {
  return plain.speed && fast.speed ? fast.speed / plain.speed : null;
}

function median(values) {
  const sorted = values.toSorted((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** The race in a sentence or two: who was how fast, and whether the texts are the same. */
export function verdict(rounds) {
  const ratios = rounds.map(ratio).filter((value) => value !== null);
  const said = [];
  if (ratios.length) {
    const of = ratios.length > 1 ? `, median of ${count(ratios.length, "round")}` : "";
    const base = rounds[0].plain.title;
    const whom = base === "plain" ? "plain decoding" : base;
    said.push(`${figure(median(ratios))} times as fast as ${whom}${of}.`);
  } else {
    said.push("The answers are too short to compare their speed.");
  }
  const parted = rounds.map(({ plain, fast }) => parting(plain.words, fast.words));
  const first = parted.find((place) => place !== null);
  if (first === undefined) {
    said.push("Both texts are the same, letter by letter.");
  } else {
    const held = rounds.at(-1).fast.summary?.guarantee;
    said.push(`The texts part at letter ${first + 1}${held ? `; the guarantee is: ${held}` : ""}.`);
  }
  return said.join(" ");
}

/** Where two texts first differ; null where they do not. */
function parting(one, other) {
  if (one === other) return null;
  let i = 0;
  while (i < one.length && one[i] === other[i]) i += 1;
  return i;
}

/** A table with a row a round. */
export function table(rounds, fast) {
  const names = { plain: rounds[0].plain.title, fast };
  const head = ["Round", "First", `${names.plain}, tokens/s`, `${fast}, tokens/s`, "times"];
  const rows = rounds.map((round, i) => [
    i + 1,
    round.first ? names[round.first] : "at once",
    figure(round.plain.speed),
    figure(round.fast.speed),
    figure(ratio(round)),
  ]);
  return element(
    "table",
    {},
    element("caption", { className: "soft small" }, "Speeds after the first token"),
    element("thead", {}, row("th", head)),
    element("tbody", {}, ...rows.map((cells) => row("td", cells))),
  );
}

function row(kind, cells) {
  return element("tr", {}, ...cells.map((cell) => element(kind, {}, String(cell))));
}
