// @ts-check
/** Texts and tokens of the step that is shown; tokens can be coloured by a field with a number for each. */

import { errorState, h, replace } from "../../dom.js";
import { integer, number } from "../../format.js";
import { isPerToken, isPieces, toNumber } from "./fields.js";
import { newestOnly } from "./rows.js";

/** Tokens that are drawn before the reader asks for all. */
const MOST_TOKENS = 2000;

/**
 * @param {import("./rows.js").RowCache} rows
 * @param {import("./fields.js").Field[]} fields
 * @param {import("../../app.js").Context} context
 */
export function drawTexts(rows, fields, { query, setQuery }) {
  const texts = fields.filter((field) => field.kind === "text");
  const tokens = [...fields.filter(isPieces), ...fields.filter((field) => field.kind === "tokens")];
  const scores = fields.filter((field) => isPerToken(field) && field.kind !== "tokens");
  const change = () => {
    setQuery({ colour: colours.value });
    show(current);
  };
  const choices = scores.map(({ name }) => h("option", { value: name, selected: name === query.get("colour") }, name));
  const colours = h("select", { id: "colour", change }, h("option", { value: "" }, "nothing"), choices);
  if (!query.has("colour") && scores.length) colours.value = scores[0].name;
  const body = h("div.column");
  const title = h("h2", { id: "texts-title" }, tokens.length ? "Texts and tokens" : "Texts");
  const picker = tokens.length && scores.length ? h("label.row", null, "Colour tokens by", colours) : null;
  const element = h("section.card", { "aria-labelledby": "texts-title" }, h("div.heading", null, title, picker), body);
  element.hidden = texts.length + tokens.length === 0;
  let current = 0;
  const section = (/** @type {import("./fields.js").Field} */ field, /** @type {any} */ content) =>
    h("section.text", null, h("h3", null, field.name), content);
  const show = newestOnly(
    async (step) => {
      current = step;
      if (element.hidden) return () => {};
      const row = await rows.get(step);
      if (row === null) return () => replace(body, h("p.soft", null, "This step has left the store."));
      return () => {
        const score = scores.find((each) => each.name === colours.value);
        replace(
          body,
          texts.map((field) => section(field, drawText(row[field.name]))),
          tokens.map((field) => section(field, drawTokens(row[field.name], score?.name, row))),
        );
      };
    },
    (error) => replace(body, errorState(error)),
  );
  return { element, show };
}

/** @param {any} value */
function drawText(value) {
  if (value === null || value === undefined) return h("p.soft", null, "none");
  if (value === "") return h("p.soft", null, "empty");
  return h("p.prose", { dir: "auto" }, String(value));
}

/**
 * @param {any} values
 * @param {string | undefined} score Name of the field that colours them.
 * @param {Record<string, any>} row
 */
export function drawTokens(values, score, row) {
  if (!Array.isArray(values)) return h("p.soft", null, "none");
  if (values.length === 0) return h("p.soft", null, "no tokens");
  const found = score === undefined ? null : row[score];
  const numbers = Array.isArray(found) && found.length === values.length ? found.map(toNumber) : null;
  const [low, high] = rangeOf(numbers ?? []);
  const token = (/** @type {number} */ at) => {
    const value = numbers?.[at] ?? null;
    const text = String(values[at]);
    const title = `token ${at}: ${text.slice(0, 80)}${value === null ? "" : `, ${score} ${number(value)}`}`;
    const span = h(typeof values[at] === "string" ? "span.token.piece" : "span.token", { title }, text);
    if (value !== null) span.style.backgroundColor = shade(value, low, high);
    return span;
  };
  const place = h("p.tokens", { dir: "auto" });
  const add = (/** @type {number} */ from, /** @type {number} */ to) => {
    for (let at = from; at < to; at += 1) place.append(token(at));
  };
  const addRest = () => {
    add(MOST_TOKENS, values.length);
    more.remove();
  };
  const more = h("button", { type: "button", click: addRest }, `Show all ${integer(values.length)} tokens`);
  add(0, Math.min(values.length, MOST_TOKENS));
  return [place, values.length > MOST_TOKENS ? more : null, drawLegend(score, numbers !== null, low, high)];
}

/** @param {string | undefined} score @param {boolean} fits @param {number} low @param {number} high */
function drawLegend(score, fits, low, high) {
  if (score === undefined) return null;
  if (!fits) return h("p.soft", null, `${score} has no value for each of these tokens.`);
  return h(
    "p.legend",
    null,
    `${score}: `,
    swatch(low, low, high),
    number(low),
    " to ",
    swatch(high, low, high),
    number(high),
  );
}

/** @param {(number | null)[]} numbers There may be too many for the arguments of `Math.min`. */
function rangeOf(numbers) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of numbers) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

/** @param {number} value @param {number} low @param {number} high */
function swatch(value, low, high) {
  const span = h("span.swatch", { "aria-hidden": "true" });
  span.style.backgroundColor = shade(value, low, high);
  return span;
}

/**
 * A colour for a value: two hues where there are both signs, otherwise one that grows from the smallest value on.
 *
 * @param {number} value @param {number} low @param {number} high
 */
export function shade(value, low, high) {
  const both = low < 0 && high > 0;
  const part = both ? Math.abs(value) / Math.max(-low, high) : high > low ? (value - low) / (high - low) : 1;
  const inverse = !both && high <= 0; // of log-probabilities the unlikely tokens stand out
  const share = Math.round((inverse ? 1 - part : part) * 48);
  const hue = (both && value < 0) || inverse ? "--series-2" : "--series-1";
  return `color-mix(in srgb, var(${hue}) ${share}%, transparent)`;
}
