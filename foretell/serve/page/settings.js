// The form: what it asks of the server, and troubles said beside the field they are about.

import { byId, element } from "./dom.js";
import { sentence } from "./format.js";

const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
]; // prettier-ignore
/** Fields of requests that have another name in the form. */
const FIELDS = {
  messages: "prompt",
  max_completion_tokens: "max_tokens",
  structured_outputs: "constraint",
  json_schema: "constraint",
  regex: "constraint",
  speculation: "method",
};
const CONSTRAINTS = { json: "Schema", regex: "Regular expression" };

/** What of the form keeps a request from being made; beside the field it is about. */
export class Invalid extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Says a trouble beside the form's field and opens what hides it; false if there is no such field.
 *
 * field: as the server names it, `structured_outputs.regex`
 */
export function complain(field, message) {
  const first = field?.split(".")[0];
  const name = FIELDS[first] ?? first;
  const input = name && byId("form").elements.namedItem(name);
  if (!(input instanceof HTMLElement) || input.closest("[hidden]")) return false;
  for (let at = input.parentElement; at; at = at.parentElement) {
    if (at instanceof HTMLDetailsElement) at.open = true;
  }
  let where = byId(`${name}-trouble`);
  if (!where) {
    where = element("p", { className: "trouble small", id: `${name}-trouble` });
    input.after(where);
    input.setAttribute("aria-describedby", where.id);
  }
  // The server begins with the field's name, which stands here already.
  where.textContent = sentence(message.replace(/^[\w.]+: /, ""));
  where.hidden = false;
  input.setAttribute("aria-invalid", "true");
  input.focus();
  return true;
}

/** Forgets what was said of all fields. */
export function forgive() {
  for (const input of byId("form").querySelectorAll("[aria-invalid]")) {
    input.removeAttribute("aria-invalid");
    byId(`${input.name}-trouble`).hidden = true;
  }
}

const text = (name) => byId("form").elements.namedItem(name).value;

export const mode = () => text("mode");

/** The number of a field, null where it is empty. Raises Invalid. */
export function number(name) {
  const input = byId(name);
  if (!input.value && !input.validity.badInput) return null;
  if (input.checkValidity()) return input.valueAsNumber;
  const what = input.step === "any" ? "a number" : "a whole number";
  const least = input.min ? ` from ${input.min}` : "";
  const most = input.max ? ` to ${input.max}` : "";
  throw new Invalid(name, `This must be ${what}${least}${most}.`);
}

/** {path, body} of a request, in chat after the messages of `turns`. Raises Invalid. */
export function request(prompt, turns) {
  const body = { stream: true, stream_options: { include_usage: true }, trace: true };
  const method = text("method").trim();
  if (method) body.method = method;
  for (const name of NUMBERS) {
    const value = number(name);
    if (value !== null) body[name] = value;
  }
  const stop = text("stop").split("\n").filter(Boolean);
  if (stop.length) body.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
  const constraint = structure();
  if (constraint) body.structured_outputs = constraint;
  if (mode() === "text") return { path: "v1/completions", body: { ...body, prompt } };
  const system = text("system").trim();
  const messages = [...turns, { role: "user", content: prompt }];
  if (system) messages.unshift({ role: "system", content: system });
  return { path: "v1/chat/completions", body: { ...body, messages } };
}

/** The constraint on the answer's form, null for any text. Raises Invalid. */
function structure() {
  const format = text("format");
  const given = text("constraint");
  if (format === "object") return { json: { type: "object" } };
  if (!format) return null;
  if (!given.trim()) {
    throw new Invalid("constraint", `Give a ${CONSTRAINTS[format].toLowerCase()}.`);
  }
  if (format === "regex") return { regex: given };
  try {
    return { json: JSON.parse(given) };
  } catch (error) {
    throw new Invalid("constraint", `This is no JSON: ${error.message}.`);
  }
}

/** Shows of the settings what the mode and the format need. */
export function followChoices() {
  const format = text("format");
  byId("constraint-field").hidden = !(format in CONSTRAINTS);
  const label = byId("constraint-field").querySelector("label");
  label.textContent = CONSTRAINTS[format] ?? "";
  byId("chat-settings").hidden = mode() !== "chat";
  const chat = mode() === "chat";
  byId("keys").textContent = chat
    ? "Enter sends, Shift+Enter begins a line, Esc stops"
    : "Ctrl+Enter sends, Esc stops";
  byId("prompt").placeholder = chat ? "Ask something" : "Begin a text to be continued";
}
