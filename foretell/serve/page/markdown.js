// What models write in Markdown, as elements: headings, lists, quotes, tables, code, emphasis and
// links.
//
// Nothing of a text becomes markup: elements are made by names that stand here, and every letter
// goes into a text node. HTML and images stay letters; links lead to http and https alone.

import { element } from "./dom.js";

const DEEP = 8; // how far quotes, lists and emphasis may stand within each other
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^ {0,3}(?:[-*+]|(\d{1,9})[.)])(?:[ \t]+|$)/;
const COLUMNS = /^[ \t]*\|?(?:[ \t]*:?-+:?[ \t]*\|)+(?:[ \t]*:?-+:?[ \t]*)?$/;
const MARKS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };
const LETTER = /[\p{L}\p{N}]/u;

/**
 * The nodes of a text: [from, to] is a part of it as it stands, {tag, nodes} an element, with
 * `href` and `start` where it has them.
 */
export function parsed(text) {
  const lines = [];
  for (let from = 0; from <= text.length; ) {
    const end = text.indexOf("\n", from);
    const to = end < 0 ? text.length : end;
    lines.push([from, to]);
    from = to + 1;
  }
  return blocks(text, lines, 0);
}

/** Whether the nodes are more than paragraphs of plain text. */
export function isMarked(nodes) {
  return nodes.some((node) => node.tag && (node.tag !== "p" || isMarked(node.nodes)));
}

/** The elements of nodes; leaf(from, to): what a part of the text becomes. */
export function built(nodes, leaf) {
  return nodes.flatMap((node) => {
    if (!node.tag) return leaf(...node);
    const made = element(node.tag, {}, ...built(node.nodes, leaf));
    if (node.start) made.start = node.start;
    if (node.href) {
      Object.assign(made, { href: node.href, title: node.href, target: "_blank" });
      made.rel = "noopener noreferrer";
    }
    return made;
  });
}

// --- blocks: `lines` are parts of the text, without what stands before them in a list or a quote

function blocks(text, lines, depth) {
  const found = [];
  const said = (line) => text.slice(...line);
  for (let i = 0; i < lines.length; ) {
    const line = said(lines[i]);
    let end = i + 1; // of a quote, a table or a paragraph
    while (end < lines.length && !ends(said(lines[end]), line)) end += 1;
    const heading = HEADING.exec(line);
    const fence = FENCE.exec(line);
    if (!line.trim()) {
      i += 1;
    } else if (fence) {
      const close = lines.findIndex((one, n) => n > i && closes(said(one), fence[1]));
      const last = close < 0 ? lines.length : close;
      const code = lines.slice(i + 1, last).map(([from, to]) => [from, to + 1]); // with its end
      found.push({ tag: "pre", nodes: [{ tag: "code", nodes: code }] });
      i = last + 1;
    } else if (heading) {
      const from = lines[i][0] + heading[0].length;
      const level = Math.min(6, 3 + heading[1].length); // the page has three of its own
      found.push({ tag: `h${level}`, nodes: inline(text, from, lines[i][1], depth) });
      i += 1;
    } else if (RULE.test(line)) {
      found.push({ tag: "hr", nodes: [] });
      i += 1;
    } else if (depth < DEEP && QUOTE.test(line)) {
      const own = lines.slice(i, end).map((one) => without(one, QUOTE.exec(said(one))?.[0].length));
      found.push({ tag: "blockquote", nodes: blocks(text, own, depth + 1) });
      i = end;
    } else if (depth < DEEP && ITEM.test(line)) {
      i = list(text, lines, i, depth, found);
    } else if (i + 1 < lines.length && line.includes("|") && COLUMNS.test(said(lines[i + 1]))) {
      const rows = [lines[i], ...lines.slice(i + 2, end)];
      found.push({ tag: "table", nodes: rows.map((one, n) => row(text, one, n, depth)) });
      i = Math.max(end, i + 2);
    } else {
      const nodes = lines.slice(i, end).flatMap(([from, to], n) => [
        ...(n ? [[lines[i + n - 1][1], lines[i + n - 1][1] + 1]] : []), // the break before it
        ...inline(text, from, to, depth),
      ]);
      found.push({ tag: "p", nodes });
      i = end;
    }
  }
  return found;
}

/** Whether a line ends the quote, table or paragraph that began with `first`. */
function ends(line, first) {
  if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  return QUOTE.test(line) !== QUOTE.test(first) || ITEM.test(line);
}

function closes(line, fence) {
  const own = FENCE.exec(line)?.[1];
  return line.trim() === own && own[0] === fence[0] && own.length >= fence.length;
}

function without([from, to], letters = 0) {
  return [Math.min(from + letters, to), to];
}

/** Adds the list that begins at line i; returns the line behind it. */
function list(text, lines, i, depth, found) {
  const marker = (n) => ITEM.exec(text.slice(...lines[n]));
  const number = marker(i)[1];
  const node = { tag: number ? "ol" : "ul", start: number && Number(number), nodes: [] };
  let own = null; // lines of the newest item
  let gap = false; // whether an empty line came before this one
  const close = () => own && node.nodes.push({ tag: "li", nodes: blocks(text, own, depth + 1) });
  for (; i < lines.length; i += 1) {
    const line = text.slice(...lines[i]);
    const item = marker(i);
    const indent = /^[ \t]*/.exec(line)[0].length;
    if (item && (!own || indent < 2)) {
      if (Boolean(item[1]) !== Boolean(number)) break;
      close();
      own = [without(lines[i], item[0].length)];
    } else if (!line.trim() || indent >= 2 || !(gap || ends(line, ""))) {
      own.push(without(lines[i], Math.min(indent, line.startsWith("\t") ? 1 : 4)));
    } else {
      break;
    }
    gap = !line.trim();
  }
  close();
  found.push(node);
  return i;
}

function row(text, [from, to], number, depth) {
  const nodes = [];
  let start = from;
  for (let at = from; at <= to; at += 1) {
    if (at < to && (text[at] !== "|" || text[at - 1] === "\\")) continue;
    const cell = text.slice(start, at);
    if (cell.trim() || (start > from && at < to)) {
      const begin = at - cell.trimStart().length;
      const end = Math.max(begin, start + cell.trimEnd().length);
      nodes.push({ tag: number ? "td" : "th", nodes: inline(text, begin, end, depth) });
    }
    start = at + 1;
  }
  return { tag: "tr", nodes };
}

// --- within a line

function inline(text, from, to, depth) {
  const nodes = [];
  let plain = from; // where what is not in a node yet begins
  const add = (at, behind, ...more) => {
    if (at > plain) nodes.push([plain, at]);
    nodes.push(...more);
    plain = behind;
  };
  for (let at = from; at < to; ) {
    const found = text[at] === "\\" ? escaped(text, at, to) : span(text, at, from, to, depth);
    if (found) add(at, found.behind, ...found.nodes);
    at = found ? found.behind : at + (mark(text, at).length || 1);
  }
  add(to, to);
  return nodes;
}

function escaped(text, at, to) {
  const plain = at + 1 < to && /[!-/:-@[-`{-~]/.test(text[at + 1]);
  return plain ? { behind: at + 2, nodes: [[at + 1, at + 2]] } : null;
}

/** The longest mark at a place; "" where there is none. */
function mark(text, at) {
  return Object.keys(MARKS).find((one) => text.startsWith(one, at)) ?? "";
}

/** What begins at a place, and where it ends; null: nothing does. */
function span(text, at, from, to, depth) {
  if (text[at] === "`") return code(text, at, to);
  if (depth >= DEEP) return null;
  if (text[at] === "[" && text[at - 1] !== "!") return link(text, at, to, depth);
  const own = mark(text, at);
  const start = at + own.length;
  if (!own || start >= to || /\s/.test(text[start])) return null;
  const word = own[0] === "_"; // within a word it is a letter: snake_case
  if (word && at > from && LETTER.test(text[at - 1])) return null;
  for (let end = text.indexOf(own, start + 1); end > 0 && end < to; ) {
    const behind = end + own.length;
    const alone = own.length > 1 || (text[end + 1] !== own && text[end - 1] !== own);
    const outside = !(word && behind < to && LETTER.test(text[behind]));
    if (alone && outside && !/\s/.test(text[end - 1]) && behind <= to) {
      return { behind, nodes: [{ tag: MARKS[own], nodes: inline(text, start, end, depth + 1) }] };
    }
    end = text.indexOf(own, end + 1);
  }
  return null;
}

function code(text, at, to) {
  const ticks = /^`+/.exec(text.slice(at, to))[0];
  const start = at + ticks.length;
  for (let end = text.indexOf(ticks, start); end > 0 && end + ticks.length <= to; ) {
    const more = /^`+/.exec(text.slice(end, to))[0].length;
    if (more === ticks.length) {
      return { behind: end + more, nodes: [{ tag: "code", nodes: [[start, end]] }] };
    }
    end = text.indexOf(ticks, end + more);
  }
  return { behind: start, nodes: [[at, start]] };
}

function link(text, at, to, depth) {
  const middle = text.indexOf("](", at);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0 || end >= to || /[[\]]/.test(text.slice(at + 1, middle))) return null;
  const href = address(text.slice(middle + 2, end));
  if (!href) return null;
  const nodes = inline(text, at + 1, middle, depth + 1);
  return { behind: end + 1, nodes: [{ tag: "a", href, nodes }] };
}

/** Where a link may lead; null: nowhere. */
function address(said) {
  if (!/^https?:\/\/[^\s<>]+$/i.test(said)) return null;
  try {
    return new URL(said).href;
  } catch {
    return null;
  }
}
