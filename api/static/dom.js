// @ts-check
/** Build elements. Texts become text nodes, never markup, so nothing that a store contains can run. */

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
    else if (key === "value" || key === "checked" || key === "indeterminate") element[key] = value;
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
 */
export function errorState(error) {
  return h("div.error", { role: "alert" },
    h("p", null, error.message ?? String(error)), error.hint ? h("p.hint", null, error.hint) : null);
}
