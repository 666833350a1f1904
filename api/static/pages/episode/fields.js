// @ts-check
/** The kinds of fields that an episode's rows have, and their values. */

import { isLongInteger } from "../../client.js";

/**
 * A field, as the summary of a store describes it.
 *
 * @typedef {object} Field
 * @property {string} name
 * @property {string} kind Such as "scalar", "vector", "image", "text" or "tokens".
 * @property {string} type As people read it, such as "float32[3]".
 * @property {string} dtype "arrow" if its values have a variable length.
 * @property {number[]} shape Of one row.
 * @property {string[] | null} [actions] Names of its values, if they are actions.
 */

/** @param {Field} field @returns {number} The number of values of a row. */
export function elementsOf(field) {
  return field.shape.reduce((product, side) => product * side, 1);
}

/** @param {Field} field Whether it may have a number for each token. */
export function isPerToken(field) {
  return (
    field.dtype === "arrow" &&
    /^(float|double|u?int|bool)[a-z0-9]*\[\?\]$|list<(float|double|halffloat|u?int|bool)[a-z0-9]*>/.test(field.type)
  );
}

/** @param {Field} field Whether its values are lists of the texts of tokens. */
export function isPieces(field) {
  return field.dtype === "arrow" && /^(large_)?list<(large_)?string>$/.test(field.type);
}

/** @param {any} value A value of shape [] or [1] as a number or text. */
export function plain(value) {
  return Array.isArray(value) && value.length === 1 && !Array.isArray(value[0]) ? value[0] : value;
}

/** @param {any} value @returns {number | null} Null: it is not a number. */
export function toNumber(value) {
  const single = plain(value);
  if (typeof single === "boolean" || isLongInteger(single)) return Number(single);
  return typeof single === "number" ? single : null;
}

/**
 * Fields without those that repeat another one a step later, such as `next.state` if there is `state`.
 *
 * @template {{name: string}} T
 * @param {T[]} fields
 * @returns {T[]}
 */
export function withoutNext(fields) {
  const names = new Set(fields.map((field) => field.name));
  return fields.filter(({ name }) => !(name.startsWith("next.") && names.has(name.slice(5))));
}
