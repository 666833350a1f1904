// @ts-check
/** Returns, lengths and throughput over episodes, rows or time: asked of the server, smoothed, and drawn as lines. */

import { getJson, storePath } from "./client.js";
import { paletteColour } from "./chart.js";
import { h } from "./dom.js";

/**
 * @typedef {object} Group
 * @property {string | null} name
 * @property {boolean} other Whether it has the groups beyond the largest ones.
 * @property {number[]} x
 * @property {(number | null)[]} mean
 * @property {(number | null)[]} min
 * @property {(number | null)[]} max
 * @property {number[]} count
 */
/** @typedef {{groups: Group[], truncated: boolean}} Answer */

/** Most values of all lines of a chart. */
const MOST_POINTS = 10_000;
/** Most groups that the server returns; the last one has the rest. */
const MOST_GROUPS = 20;
/** Characters to which the server cuts names of groups. */
const NAME_LENGTH = 200;
/** Smoothing at first, and most. */
export const SMOOTHING = { first: 0.6, most: 0.98 };
/** What the x axis can be. @type {[string, string][]} */
export const X_CHOICES = [
  ["episode", "Episodes"],
  ["rows", "Rows"],
  ["time", "Time"],
];
/** @type {[string, string][]} */
const GROUP_CHOICES = [
  ["none", "Nothing"],
  ["source", "Source"],
  ["session", "Session"],
  ["split", "Split"],
  ["status", "Status"],
];

/**
 * Ask for one quantity of a store's ended episodes.
 *
 * @param {string} store
 * @param {{y: string, by?: string, x?: string, where?: string, points?: number}} query
 * @param {AbortSignal} signal
 * @returns {Promise<Answer>}
 */
export async function fetchSeries(store, { points, ...query }, signal) {
  const each = points ?? (query.by && query.by !== "none" ? Math.floor(MOST_POINTS / MOST_GROUPS) : 1000);
  return getJson(storePath(store, "/series"), { query: { ...query, points: each }, signal });
}

/**
 * What episodes can be grouped by: their columns, and the facts that recent ones have.
 *
 * @param {string} store
 * @param {AbortSignal} signal
 * @returns {Promise<[string, string][]>} Value and text of each.
 */
export async function groupChoices(store, signal) {
  const { columns, rows } = await getJson(storePath(store, "/episodes"), {
    query: { limit: 100, order: "-episode_id" },
    signal,
  });
  const at = columns.indexOf("info");
  const names = new Set();
  for (const row of rows) for (const name of Object.keys(parseFacts(row[at]))) if (name.length <= 200) names.add(name);
  return [
    ...GROUP_CHOICES,
    ...[...names]
      .sort()
      .slice(0, 50)
      .map((name) => /** @type {[string, string]} */ ([`info.${name}`, shorten(name)])),
  ];
}

/** @param {any} info Facts of an episode: JSON as text, or null. @returns {Record<string, any>} */
export function parseFacts(info) {
  try {
    const facts = typeof info === "string" ? JSON.parse(info) : info;
    return facts && typeof facts === "object" && !Array.isArray(facts) ? facts : {};
  } catch {
    return {};
  }
}

/** @param {string} text @param {number} [most] */
export function shorten(text, most = 60) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/**
 * The weight of `smooth` in an address.
 *
 * @param {string | null} text
 */
export function readSmoothing(text) {
  const weight = text === null || text === "" ? SMOOTHING.first : Number(text);
  return Number.isFinite(weight) ? Math.min(Math.max(weight, 0), SMOOTHING.most) : SMOOTHING.first;
}

/**
 * A slider for the weight of `smooth`.
 *
 * @param {number} weight
 * @param {(weight: number) => void} onInput Called while the reader moves it.
 * @param {(weight: number) => void} onChange Called when it rests.
 */
export function smoothingSlider(weight, onInput, onChange) {
  const text = h("span", null, weight.toFixed(2));
  const slider = h("input", {
    type: "range",
    min: 0,
    max: SMOOTHING.most,
    step: 0.02,
    value: weight,
    input: () => {
      text.textContent = Number(slider.value).toFixed(2);
      onInput(Number(slider.value));
    },
    change: () => onChange(Number(slider.value)),
  });
  return h("label.field", null, h("span", null, "Smoothing ", text), slider);
}

/**
 * Smooth values by an exponential mean, without a bias towards 0 at the beginning.
 *
 * @param {(number | null)[]} values null: a gap, which stays one.
 * @param {number} weight Of the former values, from 0 (no smoothing) to less than 1.
 */
export function smooth(values, weight) {
  if (weight <= 0) return values;
  let mean = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

/**
 * Put groups on one x axis, for `lineChart`. One group alone has a band from its smallest to its largest values.
 *
 * @param {(Group & {label?: string, colour?: number})[]} groups `colour`: number in the palette; default: by its name.
 * @param {number} weight Of `smooth`.
 * @returns {{x: number[], series: import("./chart.js").Series[]}}
 */
export function toLines(groups, weight) {
  groups = [...groups].sort(
    (one, other) =>
      Number(one.other) - Number(other.other) || compareNames(one.label ?? nameOf(one), other.label ?? nameOf(other)),
  );
  const x = [...new Set(groups.flatMap((group) => group.x))].sort((one, other) => one - other);
  const places = new Map(x.map((value, number) => [value, number]));
  const spread = (/** @type {Group} */ group, /** @type {(number | null)[]} */ values) => {
    const out = /** @type {(number | null)[]} */ (new Array(x.length).fill(null));
    group.x.forEach((value, number) => {
      out[/** @type {number} */ (places.get(value))] = values[number];
    });
    return out;
  };
  const band = groups.length === 1;
  return {
    x,
    series: groups.map((group, number) => ({
      label: shorten(group.label ?? nameOf(group), 40),
      colour: () => paletteColour(group.colour ?? number),
      values: spread(group, smooth(group.mean, weight)),
      ...(band ? { low: spread(group, group.min), high: spread(group, group.max) } : {}),
    })),
  };
}

/** @param {{name: string | null, other: boolean}} group */
export function nameOf(group) {
  return group.other ? "others" : (group.name ?? "none");
}

/** @param {string} one @param {string} other */
function compareNames(one, other) {
  return one.localeCompare(other, "en", { numeric: true });
}

/** @param {string} text */
function quote(text) {
  return `'${text.replaceAll("'", "''")}'`;
}

/**
 * The SQL condition for the episodes in a range of an x axis; its ends are included.
 *
 * @param {string} x A value of `X_CHOICES`.
 * @param {number} low @param {number} high
 */
export function rangeCondition(x, low, high) {
  const [from, to] = [Math.ceil(low), Math.floor(high)];
  if (x === "episode") return `episode_id BETWEEN ${from} AND ${to}`;
  if (x === "time") return `end_time BETWEEN make_timestamp(${from * 1000}) AND make_timestamp(${to * 1000 + 999})`;
  return `episode_id IN (SELECT episode_id FROM episode_rows WHERE last_id BETWEEN ${from} AND ${to})`;
}

/**
 * The SQL condition for the episodes of a group.
 *
 * @param {string} by What was grouped by.
 * @param {string | null} name Of the group; null: episodes without such a fact.
 */
export function groupCondition(by, name) {
  if (by === "none") return null;
  if (by === "session") return `source IN (SELECT name FROM sources WHERE session = ${quote(name ?? "")})`;
  const path = `/${by.slice("info.".length).replaceAll("~", "~0").replaceAll("/", "~1")}`;
  const value = by.startsWith("info.") ? `json_extract_string(info, ${quote(path)})` : by;
  if (name === null) return `${value} IS NULL`;
  return [...name].length < NAME_LENGTH ? `${value} = ${quote(name)}` : `starts_with(${value}, ${quote(name)})`;
}
