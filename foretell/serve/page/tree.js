// The token tree of one step as SVG: the accepted path is the straight line on top.

import { drawn } from "./dom.js";
import { count, visible } from "./format.js";
import { TARGET, look, spoken, underline } from "./sources.js";

const LETTER = 7.3; // pixels of a letter at the size of the labels
const ROW = 34; // between rows of nodes
const HEIGHT = 24; // of a node
const GAP = 22; // between columns
const EDGE = 3; // around the picture

/**
 * Where every node goes: depth is the column, and a first child stays in its parent's row.
 *
 * The result's nodes are those of the tree in its order, and after them the model's own token that
 * followed the accepted path, if `own` has its text. Each: {text, source, parent, accepted, own,
 * root, column, row}.
 */
export function layout(tree, own = null) {
  const accepted = new Set(tree.accepted);
  const nodes = tree.tokens.map((text, i) => ({
    text,
    source: tree.sources[i],
    parent: tree.parents[i],
    root: tree.parents[i] < 0,
    accepted: tree.parents[i] < 0 || accepted.has(i),
    own: false,
  }));
  if (own !== null && nodes.length) {
    const parent = nodes.findLastIndex((node) => node.accepted);
    nodes.push({ text: own, source: TARGET, parent, root: false, accepted: true, own: true });
  }
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => node.root || children[node.parent].push(i));
  for (const list of children) list.sort((a, b) => nodes[b].accepted - nodes[a].accepted);
  let rows = 0;
  const place = (i, column, row) => {
    nodes[i].column = column;
    nodes[i].row = row;
    children[i].forEach((child, nth) => {
      if (nth) rows += 1;
      place(child, column + 1, nth ? rows : row);
    });
  };
  nodes.forEach((node, i) => {
    if (!node.root) return;
    if (i) rows += 1;
    place(i, 0, rows);
  });
  return nodes;
}

/** What a step's tree shows, in a sentence. */
export function described({ tree, parts }) {
  const text = `“${visible(parts.join("").replace(/^ /, ""), 60)}”`;
  if (!tree || tree.parents.every((parent) => parent < 0)) {
    return `Nothing was drafted; the model added ${text}.`;
  }
  const drafted = tree.parents.filter((parent) => parent >= 0).length;
  const kept = tree.accepted.filter((node) => tree.parents[node] >= 0).length;
  return `${kept} of ${count(drafted, "drafted token")} accepted: ${text}`;
}

/** Draws a step's tree into an SVG element. */
export function drawTree(svg, step) {
  const { tree, parts, sources } = step;
  svg.setAttribute("aria-label", described(step));
  if (!tree) {
    svg.replaceChildren();
    size(svg, 0, 0);
    return;
  }
  // Behind the accepted path stands the token that the model chose itself.
  const kept = tree.accepted.filter((node) => tree.parents[node] >= 0).length;
  const own = sources[kept] === TARGET && parts.length === kept + 1 ? parts[kept] : null;
  const nodes = layout(tree, own);
  const widths = [];
  for (const node of nodes) {
    node.label = visible(node.text);
    node.width = Math.max(2, [...node.label].length) * LETTER + 14;
    widths[node.column] = Math.max(widths[node.column] ?? 0, node.width);
  }
  const starts = [EDGE];
  widths.forEach((width, i) => starts.push(starts[i] + width + GAP));
  for (const node of nodes) {
    node.x = starts[node.column];
    node.y = EDGE + node.row * ROW;
  }
  const edges = nodes.filter((node) => !node.root).map((node) => edge(nodes[node.parent], node));
  // Accepted edges lie above the others, which share their beginnings.
  edges.sort((a, b) => a.classList.contains("accepted") - b.classList.contains("accepted"));
  svg.replaceChildren(...edges, ...nodes.map(box));
  const rows = Math.max(...nodes.map((node) => node.row));
  size(svg, starts.at(-1) - GAP + EDGE, rows * ROW + HEIGHT + 2 * EDGE);
}

function size(svg, width, height) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
}

function edge(parent, child) {
  const x1 = parent.x + parent.width;
  const y1 = parent.y + HEIGHT / 2;
  const y2 = child.y + HEIGHT / 2;
  const bend = child.x - GAP / 2;
  const line =
    y1 === y2
      ? `M${x1} ${y1}H${child.x}`
      : `M${x1} ${y1}H${bend - 5}Q${bend} ${y1} ${bend} ${y1 + 5}V${y2 - 5}` +
        `Q${bend} ${y2} ${bend + 5} ${y2}H${child.x}`;
  return drawn("path", { d: line, class: child.accepted ? "edge accepted" : "edge rejected" });
}

function box(node) {
  const { x, y, width } = node;
  const state = node.root ? "root" : node.own ? "own" : node.accepted ? "accepted" : "rejected";
  const tells = {
    root: "the last token of the text",
    own: "the model’s own token",
    accepted: `proposed by ${spoken(node.source)}, accepted`,
    rejected: `proposed by ${spoken(node.source)}, rejected`,
  };
  const group = drawn(
    "g",
    { class: `node ${state} ${node.root ? "" : look(node.source)}` },
    drawn("title", {}, `“${visible(node.text, 60)}”: ${tells[state]}`),
    drawn("rect", { x, y, width, height: HEIGHT, rx: 5 }),
    drawn("text", { x: x + width / 2, y: y + 16, "text-anchor": "middle" }, node.label),
  );
  if (!node.root && node.source !== TARGET) {
    group.append(drawn("path", { class: "rule", d: rule(node), "stroke-dasharray": dashes(node) }));
  }
  return group;
}

/** The line below a label, in the pattern that the source's tokens have in the text. */
function rule({ x, y, width, source }) {
  const [from, to, below] = [x + 7, x + width - 7, y + 20];
  switch (underline(source)) {
    case "double":
      return `M${from} ${below - 1.2}H${to}M${from} ${below + 1.8}H${to}`;
    case "wavy":
      return `M${from} ${below}${"q2 -3 4 0t4 0".repeat(Math.floor((to - from) / 8))}`;
    default:
      return `M${from} ${below}H${to}`;
  }
}

function dashes({ source }) {
  return { dashed: "5 3", dotted: "1.6 2.4" }[underline(source)] ?? "none";
}
