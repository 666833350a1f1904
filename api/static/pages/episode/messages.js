// @ts-check
/** Messages of language models: what their JSON says, in the forms of chat completions and of responses. */

/**
 * A part of a message.
 *
 * @typedef {object} Part
 * @property {"text" | "call" | "result" | "thought" | "other"} kind
 * @property {string} title Of a call, the name of the tool; of other parts, what they are; "": plain text.
 * @property {string} text
 */

/** @typedef {{role: string, parts: Part[]}} Message */

/** A row, as the server sends it. @typedef {{step: number, shared: number, like: number | null, messages: (string | null)[]}} Turn */

/** Keys of a message that its parts show. */
const SHOWN = new Set([
  "role",
  "content",
  "tool_calls",
  "tool_call_id",
  "type",
  "call_id",
  "name",
  "arguments",
  "output",
]);
/** Keys of texts that a model has thought. */
const THOUGHTS = ["reasoning_content", "reasoning", "thinking"];

/** @param {any} value @returns {value is Record<string, any>} */
function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

/** @param {any} value @returns {string} A text as it is, other values as JSON on lines. */
function textOf(value) {
  if (typeof value === "string") return value;
  try {
    return JSON.stringify(value, null, 2) ?? "";
  } catch {
    return "nested too deeply to be shown"; // there is no other reason
  }
}

/** @param {any} value Arguments of a call: JSON, mostly as a text. */
function argumentsOf(value) {
  if (typeof value !== "string") return textOf(value ?? {});
  try {
    return textOf(JSON.parse(value));
  } catch {
    return value;
  }
}

/** @param {string} type Of a part @param {any} value @returns {Part} A picture or a file as its size. */
function dataPart(type, value) {
  const text = textOf(value);
  const found = /"(data:[^;,"]{0,80})[^"]*/.exec(text);
  return { kind: "other", title: type, text: found ? `${found[1]}, ${found[0].length} characters` : text };
}

/** @param {any} content @returns {Part[]} */
function contentParts(content) {
  if (content === null || content === undefined || content === "") return [];
  return (Array.isArray(content) ? content : [content]).map((part) => {
    if (!isObject(part)) return { kind: "text", title: "", text: textOf(part) };
    const type = String(part.type ?? "part");
    if (typeof part.text === "string")
      return { kind: type.includes("text") ? "text" : "other", title: "", text: part.text };
    if (type === "refusal") return { kind: "text", title: "refusal", text: textOf(part.refusal) };
    return dataPart(type, part);
  });
}

/**
 * Read a message. Any text is one: what is no JSON object is shown as it is.
 *
 * @param {string | null} text
 * @param {Map<string, string>} [names] Names of tools by the ids of their calls; calls of the message are added.
 * @returns {Message}
 */
export function parseMessage(text, names = new Map()) {
  let found;
  try {
    found = JSON.parse(text ?? "null");
  } catch {
    // No JSON.
  }
  if (!isObject(found)) return { role: "", parts: contentParts(text) };
  const type = typeof found.type === "string" ? found.type : "message";
  /** @type {Part[]} */
  const parts = THOUGHTS.filter((name) => found[name]).map((name) => ({
    kind: "thought",
    title: "reasoning",
    text: textOf(found[name]),
  }));
  const rest = Object.entries(found).filter(([name]) => !SHOWN.has(name) && !THOUGHTS.includes(name));
  const call = (/** @type {any} */ named, /** @type {any} */ id) => {
    const name = String(named?.name ?? "a tool");
    names.set(String(id), name);
    parts.push({ kind: "call", title: name, text: argumentsOf(named?.arguments ?? named?.input) });
  };
  let role = String(found.role ?? "");
  if (type === "function_call") {
    role ||= "assistant";
    call(found, found.call_id);
  } else if (role === "tool" || type.endsWith("_output")) {
    role = "tool";
    const name = String(found.name ?? names.get(String(found.tool_call_id ?? found.call_id)) ?? "");
    const contents = contentParts(found.content ?? found.output);
    parts.push({ kind: "result", title: name, text: contents.map((part) => part.text).join("\n") });
  } else if (type === "reasoning") {
    role ||= "assistant";
    const thoughts = [...contentParts(found.summary), ...contentParts(found.content)];
    parts.push({ kind: "thought", title: "reasoning", text: thoughts.map((part) => part.text).join("\n") });
  } else {
    parts.push(...contentParts(found.content));
    const calls = Array.isArray(found.tool_calls) ? found.tool_calls : [];
    for (const one of calls) call(isObject(one?.function) ? one.function : one, one?.id);
    if (found.refusal) parts.push({ kind: "text", title: "refusal", text: textOf(found.refusal) });
    // What has no role is no message in a form that is known.
    if (!role)
      return { role: type === "message" ? "" : type, parts: [{ kind: "other", title: "", text: textOf(found) }] };
  }
  const hidden = new Set(["id", "status", "refusal", "summary"]);
  const others = rest.filter(([name, value]) => !hidden.has(name) && value !== null);
  if (others.length) parts.push({ kind: "other", title: "other fields", text: textOf(Object.fromEntries(others)) });
  return { role, parts };
}

/** How the messages of rows follow each other. */
export class Thread {
  constructor() {
    /** Number of messages by step. @type {Map<number, number>} */
    this.lengths = new Map();
    /** @type {number | null} */
    this.last = null;
    /** @type {Map<string, string>} */
    this.names = new Map();
  }

  /**
   * Take the next row.
   *
   * @param {Turn} turn
   * @returns {{relation: string, messages: Message[]}} `relation` says what the row continues, unless that is the
   *   row before it, with all of its messages.
   */
  add({ step, shared, like, messages }) {
    const count = like === null ? 0 : (this.lengths.get(like) ?? shared);
    let relation = "";
    if (this.last !== null && shared + messages.length > 0) {
      if (like === null) relation = "A new conversation";
      else if (shared < count) relation = `A fork of step ${like} after ${shared} of its ${count} messages`;
      else if (like !== this.last) relation = `Continues step ${like}`;
    }
    this.lengths.set(step, shared + messages.length);
    if (shared + messages.length > 0) this.last = step;
    return { relation, messages: messages.map((text) => parseMessage(text, this.names)) };
  }
}

/**
 * The field with the messages of a store: lists of texts, named `messages`.
 *
 * @param {import("./fields.js").Field[]} fields
 * @returns {import("./fields.js").Field | null}
 */
export function findMessages(fields) {
  const isList = (/** @type {string} */ type) => /^(continued )?(large_)?list<(large_)?string>$/.test(type);
  return fields.find(({ name, type }) => /(^|\.)messages$/.test(name) && isList(type)) ?? null;
}
