// @ts-check
/** Requests to the server that this page came from. The token is kept in the page's session storage only. */

const ROOT = new URL("..", document.baseURI);
const TOKEN = "expstore-token";
/** Digits that may be an integer of more than 53 bits. */
const LONG_INTEGER = /(?<![\d.])\d{16,}(?![\d.eE])/;

/** @typedef {"online" | "offline" | "unauthorized"} State */
/** @type {Set<(state: State) => void>} */
const listeners = new Set();
/** @type {State} */
let state = "online";

/** An error that the server reported. */
export class ApiError extends Error {
  /** @param {number} status @param {{kind?: string, message?: string, hint?: string}} found */
  constructor(status, found) {
    super(found.message || `the server answered with status ${status}`);
    this.status = status;
    this.kind = found.kind ?? "unknown";
    this.hint = found.hint ?? "";
  }
}

/** The server could not be reached. */
export class OfflineError extends Error {
  constructor() {
    super("the server does not answer");
    this.hint = "The page tries again until it is back.";
  }
}

/**
 * Whether the frame of the page tells the reader about an error: the server is gone, or asks for a token.
 *
 * @param {any} error
 */
export function isHandled(error) {
  return error instanceof OfflineError || (error instanceof ApiError && error.status === 401);
}

/** @param {string} text Part of an address; returned as it is if it is not encoded. */
export function decodeSafely(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Take the token out of an address that ends with #token=..., so that it does not stay in the address bar. */
export function takeTokenFromAddress() {
  const found = /^#token=([^&]+)(?:&(.*))?$/.exec(location.hash);
  if (!found) return;
  setToken(decodeSafely(found[1]));
  history.replaceState(null, "", `${location.pathname}#${found[2] ?? "/"}`);
}

/** @param {string} token "" removes it. */
export function setToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

export function hasToken() {
  return sessionStorage.getItem(TOKEN) !== null;
}

/** @param {(state: State) => void} listener Called when the connection is lost, found, or refused. */
export function onConnection(listener) {
  listeners.add(listener);
  listener(state);
}

/** @param {State} next */
export function setConnection(next) {
  if (next === state) return;
  state = next;
  for (const listener of listeners) listener(next);
}

/**
 * Path of a store, for requests.
 *
 * @param {string} name
 * @param {string} [rest] What follows, such as "/summary".
 */
export function storePath(name, rest = "") {
  return `v1/stores/${encodeURIComponent(name)}${rest}`;
}

/**
 * Send a request and return the response.
 *
 * @param {string} path Relative to the server, without a leading slash.
 * @param {{method?: string, query?: Record<string, any>, body?: any, accept?: string, signal?: AbortSignal}} [options]
 *   `query`: parameters; null, undefined and "" are left out. `body` is sent as JSON.
 * @returns {Promise<Response>}
 * @throws {ApiError} The server refused it.
 * @throws {OfflineError} The server does not answer.
 */
export async function request(path, { method = "GET", query = {}, body, accept = "application/json", signal } = {}) {
  const address = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") address.searchParams.set(name, String(value));
  }
  /** @type {Record<string, string>} */
  const headers = { Accept: accept };
  const token = sessionStorage.getItem(TOKEN);
  // A header cannot have other characters, and neither has a server's token; the server refuses the replaced one.
  if (token !== null) headers.Authorization = `Bearer ${token.replace(/[^\x21-\x7e]/g, "?")}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(address, {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    setConnection("offline");
    throw new OfflineError();
  }
  if (response.status === 401) setConnection("unauthorized");
  else setConnection("online");
  if (!response.ok) throw new ApiError(response.status, await readError(response));
  return response;
}

/** @param {Response} response */
async function readError(response) {
  try {
    return (await response.json()).error ?? {};
  } catch {
    return {};
  }
}

/**
 * Send a request and return the JSON of the answer.
 *
 * @param {string} path
 * @param {Parameters<typeof request>[1]} [options]
 * @returns {Promise<any>}
 */
export async function getJson(path, options) {
  return readJson(await request(path, options));
}

/** @param {Response} response @returns {Promise<any>} The JSON of an answer, as `parseJson` reads it. */
export async function readJson(response) {
  return parseJson(await response.text());
}

/**
 * Parse JSON. Integers that numbers of JavaScript would round, such as seeds, become texts with all their digits.
 *
 * @param {string} text
 * @returns {any}
 */
export function parseJson(text) {
  if (!LONG_INTEGER.test(text)) return JSON.parse(text); // a function for each value takes several times as long
  // TypeScript does not know the third argument, which has the text of a value.
  const keep = (/** @type {[string, any, {source: string}?]} */ ...[, value, literal]) =>
    Number.isInteger(value) && !Number.isSafeInteger(value) && /^-?\d+$/.test(literal?.source ?? "")
      ? literal?.source
      : value;
  return JSON.parse(text, /** @type {any} */ (keep));
}

/** @param {any} value Whether it is an integer that `parseJson` has made a text. */
export function isLongInteger(value) {
  return typeof value === "string" && /^-?\d{16,}$/.test(value) && !Number.isSafeInteger(Number(value));
}

/** Return whether the server answers. */
export async function isAlive() {
  try {
    return (await fetch(new URL("healthz", ROOT), { cache: "no-store" })).ok;
  } catch {
    return false;
  }
}

/**
 * Offer a file for download.
 *
 * @param {string} name
 * @param {BlobPart} content
 * @param {string} type
 */
export function download(name, content, type) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
