// @ts-check
/** Tables that sort by their headings and scroll inside themselves. */

import { isLongInteger } from "./client.js";
import { h } from "./dom.js";
import { cell } from "./format.js";

/**
 * @typedef {object} Column
 * @property {string} key
 * @property {any} title A text or an element.
 * @property {boolean} [isNumber] Aligned to the right.
 * @property {boolean} [canSort] Whether the heading is a button that sorts.
 * @property {(row: any) => any} [draw] Makes the content of a cell; default: the value as text.
 */

/**
 * Draw a table.
 *
 * @param {object} options
 * @param {string} options.label What it lists; read by screen readers.
 * @param {Column[]} options.columns
 * @param {Record<string, any>[]} options.rows
 * @param {string} [options.order] The column that it is sorted by; "-name": descending.
 * @param {(order: string) => void} [options.onSort]
 * @returns {HTMLElement}
 */
export function table({ label, columns, rows, order = "", onSort }) {
  const heading = (/** @type {Column} */ column) => {
    const descending = order === `-${column.key}`;
    const sorted = descending || order === column.key;
    const properties = {
      scope: "col",
      class: column.isNumber ? "number" : null,
      "aria-sort": sorted ? (descending ? "descending" : "ascending") : null,
    };
    if (!column.canSort || !onSort) return h("th", properties, column.title);
    return h(
      "th",
      properties,
      h(
        "button.sort",
        { type: "button", click: () => onSort(sorted && descending ? column.key : `-${column.key}`) },
        column.title,
        h("span", { "aria-hidden": "true" }, sorted ? (descending ? " ↓" : " ↑") : ""),
      ),
    );
  };
  return h(
    "div.scroll",
    { tabindex: "0", role: "region", "aria-label": label },
    h(
      "table",
      null,
      h("thead", null, h("tr", null, columns.map(heading))),
      h(
        "tbody",
        null,
        rows.map((row) =>
          h(
            "tr",
            null,
            columns.map((column) =>
              h(
                "td",
                { class: column.isNumber ? "number" : null },
                column.draw ? column.draw(row) : cell(row[column.key]),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}

/**
 * Pairs of a name and a value.
 *
 * @param {[string, any][]} pairs
 */
export function facts(pairs) {
  return h(
    "dl.facts",
    null,
    pairs.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
  );
}

/** @param {number} value @param {number} most */
export function bar(value, most) {
  const fill = h("span");
  fill.style.width = `${(100 * value) / most}%`;
  return h("span.bar", { "aria-hidden": "true" }, fill);
}

/** @param {any[][]} rows @param {number} at */
export function isNumeric(rows, at) {
  return (
    rows.some((row) => row[at] !== null) &&
    rows.every((row) => row[at] === null || typeof row[at] === "number" || isLongInteger(row[at]))
  );
}

/** @param {any[][]} rows @param {number} at */
export function isTime(rows, at) {
  return (
    rows.some((row) => row[at] !== null) &&
    rows.every(
      (row) => row[at] === null || (typeof row[at] === "string" && /^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d/.test(row[at])),
    )
  );
}
