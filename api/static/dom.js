// @ts-check
/** Build elements. Texts become text nodes, never markup, so nothing that a store contains can run. */

import { ago, cell, shorten, time as formatTime, toMilliseconds } from "./format.js";

/** Kinds of errors whose message is about SQL. */
const SQL_KINDS = ["query", "schema"];

/**
 * Create an element.
 *
 * @param {string} tag Name of the element, such as "td"; classes may follow: "div.card.wide".
 * @param {Record<string, any> | null} [properties] Attributes. Functions are event listeners by the name of
 *   their event ("click"); `true` sets an empty attribute; `false`, `null` and `undefined` set none.
 * @param {...any} children Nodes, texts, numbers, or arrays of them; `null`, `undefined` and `false` are skipped.
 * @returns {any}
 */
export function h(tag, properties, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (key === "value" || key === "checked" || key === "indeterminate") /** @type {any} */ (element)[key] = value;
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, String(value));
  }
  append(element, children);
  return element;
}

/**
 * Replace everything inside an element.
 *
 * @param {Element} element
 * @param {...any} children As of `h`.
 */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/** @param {Element} element @param {any[]} children */
function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/**
 * A list to choose from, with its label.
 *
 * @param {string} label
 * @param {[string, string][]} choices Value and text of each.
 * @param {string} value The one that is chosen; if it is no choice, it is added.
 * @param {(value: string) => void} onChoice
 */
export function choice(label, choices, value, onChoice) {
  const all = choices.some(([each]) => each === value)
    ? choices
    : [...choices, /** @type {[string, string]} */ ([value, value])];
  const list = h(
    "select",
    { change: () => onChoice(list.value) },
    all.map(([each, text]) => h("option", { value: each }, text)),
  );
  list.value = value;
  return h("label.field", null, label, list);
}

/**
 * Show data that changes while the reader looks: draw it again only if it is other data, and keep what the
 * reader has scrolled or focused.
 *
 * @param {Element} place
 * @param {any} data What is shown, as JSON.
 * @param {() => any} build Returns the content.
 */
export function refresh(place, data, build) {
  const text = JSON.stringify(data) ?? "";
  if (drawn.get(place) === text) return;
  drawn.set(place, text);
  const boxes = [...place.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
  const focused = place.contains(document.activeElement)
    ? focusable(place).indexOf(/** @type {any} */ (document.activeElement))
    : -1;
  replace(place, build());
  place.querySelectorAll(".scroll").forEach((box, number) => {
    [box.scrollLeft, box.scrollTop] = boxes[number] ?? [0, 0];
  });
  if (focused >= 0) focusable(place)[focused]?.focus({ preventScroll: true });
}

/** @type {WeakMap<Element, string>} */
const drawn = new WeakMap();

/** @param {Element} place @returns {HTMLElement[]} */
function focusable(place) {
  return [...place.querySelectorAll("a, button, input, select, textarea, summary, [tabindex]")].map(
    (one) => /** @type {HTMLElement} */ (one),
  );
}

/**
 * Call a function once no call was asked for during some milliseconds.
 *
 * @param {number} milliseconds
 * @param {(...values: any[]) => void} act
 */
export function debounce(milliseconds, act) {
  let timer = 0;
  return (/** @type {any[]} */ ...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...values), milliseconds);
  };
}

/**
 * Say something to users of screen readers.
 *
 * @param {string} text
 */
export function announce(text) {
  const place = document.getElementById("announcer");
  if (place) place.textContent = text;
}

/**
 * A message in place of content: what is missing and what to do next.
 *
 * @param {string} title
 * @param {...any} children More text or nodes.
 */
export function emptyState(title, ...children) {
  return h("div.empty", null, h("p.empty-title", null, title), children.length ? h("p", null, ...children) : null);
}

/**
 * An error in place of content.
 *
 * @param {any} error An `ApiError` or another error.
 * @param {boolean} [isTyped] Whether the reader has typed the SQL that failed, and so understands a message about it.
 */
export function errorState(error, isTyped = false) {
  const isOwn = !isTyped && SQL_KINDS.includes(error.kind);
  const hint = isOwn ? "The filter in the address may not suit this store: remove it, or reload the page." : error.hint;
  return h(
    "div.error",
    { role: "alert" },
    h("p", null, isOwn ? "The server cannot answer this for the present filter." : (error.message ?? String(error))),
    hint ? h("p.hint", null, hint) : null,
  );
}

/**
 * A time as how long ago it was; the time itself is its title.
 *
 * @param {any} value As of `time` of format.js.
 */
export function relativeTime(value) {
  const at = toMilliseconds(value);
  if (value === null || value === undefined || Number.isNaN(at)) return h("span.soft", null, "unknown");
  const element = h("time", { title: formatTime(at), datetime: new Date(at).toISOString(), "data-at": at });
  updateTime(element);
  return element;
}

/** @param {HTMLElement} element A result of `relativeTime`. */
export function updateTime(element) {
  element.textContent = ago(Math.max(0, Date.now() - Number(element.dataset.at)) / 1000);
}

/**
 * A fact as text, or as a link if it is an address of the web; a program's text is never another kind of link.
 *
 * @param {any} value
 * @param {number} [most] Letters that are shown.
 */
export function linked(value, most = 200) {
  const text = shorten(cell(value), most);
  if (typeof value !== "string" || !/^https?:\/\/[^\s]+$/i.test(value) || !URL.canParse(value)) return text;
  return h("a", { href: new URL(value).href, target: "_blank", rel: "noopener noreferrer" }, text);
}
