// @ts-check
/** Numbers of episodes over episodes, rows, time or versions: asked of the server, smoothed, and drawn as lines. */

import { getJson, storePath } from "./client.js";
import { paletteColour } from "./chart.js";
import { h } from "./dom.js";
import { shorten } from "./format.js";
import { episodesOf, literal } from "./episode_data.js";

/**
 * @typedef {object} Group
 * @property {string | null} name
 * @property {boolean} other Whether it has the groups beyond the largest ones.
 * @property {number[]} x
 * @property {(number | null)[]} mean
 * @property {(number | null)[]} min
 * @property {(number | null)[]} max
 * @property {(number | null)[]} p10
 * @property {(number | null)[]} median
 * @property {(number | null)[]} p90
 * @property {number[]} count
 */
/** @typedef {{groups: Group[], truncated: boolean}} Answer */

/** Most values of all lines of a chart. */
const MOST_POINTS = 10_000;
/** Most groups that the server returns; the last one has the rest. */
const MOST_GROUPS = 20;
/** Most lines that have bands. */
const MOST_BANDS = 4;
/** What a line shows. @type {[string, string][]} */
export const LINE_CHOICES = [
  ["median", "Median"],
  ["mean", "Mean"],
];
/** Measures that can be charted. */
const MOST_MEASURES = 200;
/** Components of a vector that can be charted. */
const MOST_COMPONENTS = 16;
/** Characters to which the server cuts names of groups. */
const NAME_LENGTH = 200;
/** Smoothing at first, and most. */
export const SMOOTHING = { first: 0.6, most: 0.98 };
/** What the x axis can be. @type {[string, string][]} */
export const X_CHOICES = [
  ["episode", "Episodes"],
  ["rows", "Rows"],
  ["time", "Time"],
  ["version", "Policy version"],
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
 * What the newest episodes have: their facts and measures.
 *
 * @param {string} store
 * @param {AbortSignal} signal
 * @returns {Promise<Record<string, any>[]>}
 */
async function newestFacts(store, signal) {
  const query = { limit: 100, order: "-episode_id" };
  return episodesOf(await getJson(storePath(store, "/episodes"), { query, signal })).map(({ info }) => info);
}

/** @param {Record<string, any>[]} facts @param {(value: any) => boolean} isKind @returns {[string, string][]} */
function factChoices(facts, isKind) {
  const names = facts.flatMap((info) => Object.keys(info).filter((name) => isKind(info[name]) && name.length <= 200));
  return [...new Set(names)]
    .sort()
    .slice(0, 50)
    .map((name) => [`info.${name}`, shorten(name)]);
}

/** @param {any} value */
const isSingle = (value) => value === null || typeof value !== "object";

/**
 * What episodes can be grouped by: their columns, and the facts that recent ones have.
 *
 * @param {string} store
 * @param {AbortSignal} signal
 * @returns {Promise<[string, string][]>} Value and text of each.
 */
export async function groupChoices(store, signal) {
  return [...GROUP_CHOICES, ...factChoices(await newestFacts(store, signal), isSingle)];
}

/**
 * The numbers of an episode that can be charted: its return and length, facts, measures, and means of fields.
 *
 * @param {string} store
 * @param {import("./pages/episode/fields.js").Field[]} fields
 * @param {boolean} sql Whether the server answers SQL, which means of fields need.
 * @param {AbortSignal} signal
 * @returns {Promise<[string, string][]>} Value and text of each.
 */
export async function numberChoices(store, fields, sql, signal) {
  const facts = await newestFacts(store, signal);
  const isNumber = (/** @type {any} */ value) => typeof value === "number" || typeof value === "boolean";
  const measures = new Set(
    facts.flatMap((info) =>
      Object.entries(info.measures ?? {}).flatMap(([kind, value]) =>
        typeof value === "number"
          ? [kind]
          : Object.entries(value ?? {}).flatMap(([field, parts]) =>
              Array.isArray(parts)
                ? parts.map((_, part) => `${kind}.${field}${parts.length > 1 ? `:${part}` : ""}`)
                : [],
            ),
      ),
    ),
  );
  const parts = fields.flatMap(({ name, kind, dtype, shape }) => {
    if (kind === "scalar") return [name];
    if (shape.length !== 1 || shape[0] > MOST_COMPONENTS || dtype === "arrow" || kind === "image") return [];
    return Array.from({ length: shape[0] }, (_, part) => `${name}:${part}`);
  });
  return [
    ["return", "Return"],
    ["length", "Length"],
    ...factChoices(facts, isNumber),
    ...[...measures]
      .sort()
      .slice(0, MOST_MEASURES)
      .map((name) => /** @type {[string, string]} */ ([`measure.${name}`, `measure ${name}`])),
    ...(sql ? parts : []).map((name) => /** @type {[string, string]} */ ([`field.${name}`, `mean of ${name}`])),
  ];
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
 * Put groups on one x axis, for `lineChart`. Few groups have bands from the 10th to the 90th percentile of each bin.
 *
 * @param {(Group & {label?: string, colour?: number})[]} groups `colour`: number in the palette; default: by its name.
 * @param {number} weight Of `smooth`.
 * @param {"median" | "mean"} [line]
 * @returns {{x: number[], series: import("./chart.js").Series[]}}
 */
export function toLines(groups, weight, line = "median") {
  groups = [...groups].sort(
    (one, other) =>
      Number(one.other) - Number(other.other) || compareNames(one.label ?? nameOf(one), other.label ?? nameOf(other)),
  );
  const x = [...new Set(groups.flatMap((group) => group.x))].sort((one, other) => one - other);
  const places = new Map(x.map((value, number) => [value, number]));
  const spread = (/** @type {Group} */ group, /** @type {"p10" | "median" | "mean" | "p90"} */ name) => {
    const out = /** @type {(number | null)[]} */ (new Array(x.length).fill(null));
    const values = smooth(group[name], weight);
    group.x.forEach((value, number) => {
      out[/** @type {number} */ (places.get(value))] = values[number];
    });
    return out;
  };
  const hasBands = groups.length <= MOST_BANDS && groups.some(({ count }) => count.some((each) => each > 1));
  return {
    x,
    series: groups.map((group, number) => ({
      label: shorten(group.label ?? nameOf(group), 40),
      colour: () => paletteColour(group.colour ?? number),
      values: spread(group, line),
      ...(hasBands ? { low: spread(group, "p10"), high: spread(group, "p90") } : {}),
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

/**
 * The SQL condition for the episodes in a range of an x axis; its ends are included.
 *
 * @param {string} x A value of `X_CHOICES`.
 * @param {number} low @param {number} high
 * @param {boolean} [hasVersions] Whether the rows have the field `policy_version`; otherwise it is a fact.
 */
export function rangeCondition(x, low, high, hasVersions = false) {
  const [from, to] = [Math.ceil(low), Math.floor(high)];
  if (x === "episode") return `episode_id BETWEEN ${from} AND ${to}`;
  if (x === "time") return `end_time BETWEEN make_timestamp(${from * 1000}) AND make_timestamp(${to * 1000 + 999})`;
  if (x === "version")
    return hasVersions
      ? `episode_id IN (SELECT _episode FROM transitions WHERE policy_version BETWEEN ${from} AND ${to})`
      : `TRY_CAST(info->>'policy_version' AS DOUBLE) BETWEEN ${from} AND ${to}`;
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
  if (by === "session") return `source IN (SELECT name FROM sources WHERE session = ${literal(name ?? "")})`;
  const path = `/${by.slice("info.".length).replaceAll("~", "~0").replaceAll("/", "~1")}`;
  const value = by.startsWith("info.") ? `json_extract_string(info, ${literal(path)})` : by;
  if (name === null) return `${value} IS NULL`;
  return [...name].length < NAME_LENGTH ? `${value} = ${literal(name)}` : `starts_with(${value}, ${literal(name)})`;
}
