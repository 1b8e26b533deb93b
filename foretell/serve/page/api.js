// Talks to the server: streams of answers, and its status. Troubles are told in sentences.

import { sentence } from "./format.js";

/** Why a request failed, in a sentence for the reader. */
export class Trouble extends Error {
  /**
   * field: the field of the request at fault, if it is known.
   * status: of HTTP; 0 where none came.
   * wait: seconds after which the server wants to be asked again.
   */
  constructor(message, { field = null, status = 0, wait = null } = {}) {
    super(message);
    this.field = field;
    this.status = status;
    this.wait = wait;
  }
}

/** Addresses are relative to the page, so that it also works behind a proxy's prefix. */
function address(path) {
  return new URL(path, document.baseURI);
}

function headers(key, more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** The server's state as it gives it. Raises Trouble. */
export async function status(key) {
  let response;
  try {
    response = await fetch(address("foretell/status"), { headers: headers(key) });
  } catch {
    throw new Trouble("The server does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/**
 * The chunks of a streamed answer, parsed. Raises Trouble where the server refuses, breaks off or
 * reports an error; ends quietly once `signal` is aborted.
 */
export async function* stream(path, body, key, signal) {
  try {
    const response = await fetch(address(path), {
      method: "POST",
      headers: headers(key, { "Content-Type": "application/json" }),
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw await refusal(response);
    let complete = false;
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        complete = true;
        break;
      }
      const chunk = parsed(data);
      if (chunk.error) throw new Trouble(sentence(chunk.error.message), { status: 200 });
      yield chunk;
    }
    if (!complete) throw new Trouble("The stream broke off: the answer may be incomplete.");
  } catch (error) {
    if (signal.aborted) return;
    if (error instanceof Trouble) throw error;
    if (error instanceof TypeError) {
      throw new Trouble("The connection failed. Is the server still running?");
    }
    throw error;
  }
}

/** The data of server-sent events, one text an event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((line) => line.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) {
          data.push(line.slice(5).trimStart());
        } else if (!line && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // an aborted stream cannot be cancelled again
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Trouble("The server sent something that is no JSON: is this a foretell server?");
  }
}

/** What a refused request's answer says, whatever shape it has. */
async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy may answer in a form of its own; its status still says something.
  }
  const wait = Number(response.headers.get("Retry-After")) || null;
  const own = sentence(error.message ?? `The server answered ${response.status}.`);
  const message = {
    401: `${own} Enter an API key in the settings.`,
    429: wait ? `${own} Try again in ${wait} s.` : own,
  };
  return new Trouble(message[response.status] ?? own, {
    field: error.param ?? (response.status === 401 ? "key" : null),
    status: response.status,
    wait,
  });
}
