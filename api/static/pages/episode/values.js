// @ts-check
/** The values of the step that is shown. */

import { h } from "../../dom.js";
import { formatFact } from "../../episode_data.js";
import { number } from "../../format.js";
import { isPerToken, isPieces, plain, withoutNext } from "./fields.js";
import { newestOnly } from "./rows.js";

/** Values of a vector that are written out. */
const MOST_VALUES = 16;

/**
 * @param {import("./rows.js").RowCache} rows
 * @param {import("./fields.js").Field[]} fields
 * @param {number} first Number of the first step.
 */
export function drawValues(rows, fields, first) {
  const hasTokens = fields.some((field) => field.kind === "tokens" || isPieces(field));
  const isElsewhere = (/** @type {import("./fields.js").Field} */ field) =>
    field.kind === "text" || field.kind === "tokens" || isPieces(field) || (hasTokens && isPerToken(field));
  const small = fields.filter((field) => !isElsewhere(field)).map((field) => ({ field, cell: h("dd.mono") }));
  const heading = h("h2", { id: "values-title" }, "Values");
  const shown = new Set(withoutNext(fields));
  const list = (/** @type {boolean} */ isShown) =>
    h(
      "dl.pairs",
      null,
      small
        .filter(({ field }) => shown.has(field) === isShown)
        .map(({ field, cell }) => [h("dt", { title: field.type }, field.name), cell]),
    );
  const others = list(false);
  const element = h(
    "section.card",
    { "aria-labelledby": "values-title" },
    heading,
    list(true),
    others.childElementCount ? h("details", null, h("summary", null, "The same a step later"), others) : null,
  );
  element.hidden = small.length === 0;
  const show = newestOnly(
    async (step) => {
      heading.textContent = `Values at step ${first + step}`;
      const row = await rows.get(step);
      return () => {
        if (row === null) heading.textContent = `Step ${first + step} has left the store`;
        for (const { field, cell } of small) cell.textContent = row === null ? "" : formatValue(row[field.name], field);
      };
    },
    (error) => {
      heading.textContent = error.message;
    },
  );
  return { element, show };
}

/** @param {any} value @param {{actions?: string[] | null}} field */
export function formatValue(value, field) {
  const single = plain(value);
  if (field.actions && Number.isInteger(single)) return nameOf(field.actions, single);
  if (typeof single === "boolean") return single ? "true" : "false";
  if (Array.isArray(single)) {
    const flat = single.flat(Infinity);
    const texts = flat.slice(0, MOST_VALUES).map((one) => (typeof one === "number" ? number(one) : formatFact(one)));
    return `[${texts.join(", ")}${flat.length > MOST_VALUES ? `, … ${flat.length} in all` : ""}]`;
  }
  if (single && typeof single === "object") return JSON.stringify(single);
  return single === null || single === undefined ? "none" : number(single);
}

/** @param {string[]} names @param {number} action */
function nameOf(names, action) {
  const name = names[action];
  return name === undefined ? String(action) : `${name} (${action})`;
}
