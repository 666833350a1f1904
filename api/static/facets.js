// @ts-check
/** Counts of episodes by value, and the colour that each value has on all pages of a store. */

import { getJson, storePath } from "./client.js";
import { COLOURS, paletteColour } from "./chart.js";
import { h } from "./dom.js";

/** @typedef {{value: string, count: number, first: number}} Value */
/** @typedef {{name: string, distinct: number, episodes: number, values: Value[]}} Facet */
/** Gives a value its number in the palette. @typedef {(value: string | null) => number} Colours */

/** Values of a facet that get colours in their order. */
const MOST_VALUES = 100;
/** Milliseconds for which these are kept. */
const KEPT = 30_000;

/**
 * Count the episodes of a filter by source, status, split and facts.
 *
 * @param {string} store
 * @param {{where?: string, values?: number}} query
 * @param {AbortSignal} [signal]
 * @returns {Promise<Facet[]>}
 */
export async function fetchFacets(store, query, signal) {
  return (await getJson(storePath(store, "/facets"), { query, signal })).facets;
}

/** @type {Map<string, {at: number, facets: Promise<Facet[]>}>} */
const kept = new Map();

/**
 * The colours of the values of a column or fact. They are numbered in the order in which the values first occurred in
 * the store, so that neither a filter nor new values change them.
 *
 * @param {string} store
 * @param {string} by Such as "source" or "info.level".
 * @returns {Promise<Colours>}
 */
export async function coloursOf(store, by) {
  let found = kept.get(store);
  if (!found || performance.now() - found.at > KEPT) {
    found = { at: performance.now(), facets: fetchFacets(store, { values: MOST_VALUES }) }; // pages share it, so none aborts it
    kept.set(store, found);
  }
  try {
    return numberValues((await found.facets).find((facet) => facet.name === by)?.values ?? []);
  } catch (error) {
    kept.delete(store);
    throw error;
  }
}

/** @param {Value[]} values @returns {Colours} */
export function numberValues(values) {
  const names = [...values].sort((one, other) => one.first - other.first).map(({ value }) => value);
  const places = new Map(names.map((name, number) => [name, number]));
  return (value) => (value === null ? COLOURS - 1 : (places.get(value) ?? hash(value)));
}

/** @param {string} text A number that depends on the text only. */
function hash(text) {
  return [...text].reduce((sum, letter) => (31 * sum + (letter.codePointAt(0) ?? 0)) % 65_521, 7);
}

/** @param {number} colour Number in the palette. */
export function swatch(colour) {
  const mark = h("span.swatch", { "aria-hidden": "true" });
  mark.style.background = paletteColour(colour);
  return mark;
}
