// @ts-check
/** Episodes as the server lists them: filters, their SQL conditions, and facts. */

import { getJson, parseJson, readJson, request, storePath } from "./client.js";

/** Episodes that are looked through for the one before. */
const NEAR = 200;
/** Names of the parameters that make a filter, in addresses of pages. */
export const FILTER = ["where", "source", "status", "split", "facts", "since", "until", "order"];
/** Columns of episodes that a filter compares with a text. */
const COLUMNS = /** @type {const} */ (["source", "status", "split"]);

/**
 * @typedef {object} Filter
 * @property {string} where An SQL condition over episodes; "": none.
 * @property {string} source
 * @property {string} status
 * @property {string} split
 * @property {string} since Milliseconds since 1970: only episodes that ended then or later; "": all.
 * @property {string} until
 * @property {Record<string, string>} facts Values of facts as text.
 * @property {string} order A column; "-column": descending.
 */

/**
 * A row of the relation `episodes`; `info` is an object without the facts of the store itself; `marks` is the one
 * about selections.
 *
 * @typedef {Record<string, any>} Episode
 */

/** @param {URLSearchParams} query @returns {Filter} */
export function readFilter(query) {
  /** @type {Record<string, string>} */
  let facts = {};
  try {
    const found = JSON.parse(query.get("facts") ?? "{}");
    if (found && typeof found === "object" && !Array.isArray(found)) facts = found;
  } catch {
    // An address that was edited by hand: no facts.
  }
  const text = (/** @type {string} */ name) => query.get(name) ?? "";
  const moment = (/** @type {string} */ name) => (/^\d{1,15}$/.test(text(name)) ? text(name) : "");
  return {
    where: text("where"),
    source: text("source"),
    status: text("status"),
    split: text("split"),
    since: moment("since"),
    until: moment("until"),
    facts,
    order: text("order"),
  };
}

/** @param {Filter} filter Parameters of the address; "" removes one. */
export function writeFilter({ facts, ...rest }) {
  return { ...rest, facts: Object.keys(facts).length ? JSON.stringify(facts) : "" };
}

/** @param {Filter} filter @returns {boolean} */
export function hasFilter({ order, ...filter }) {
  return Object.values(writeFilter({ ...filter, order: "" })).some(Boolean);
}

/** @param {any} value A value as SQL. */
export function literal(value) {
  if (value === null || value === undefined) return "NULL";
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  return `'${String(value).replaceAll("'", "''")}'`;
}

/** @param {string} name A name as SQL. */
export function identifier(name) {
  return `"${name.replaceAll('"', '""')}"`;
}

/** @param {string} name @param {string} value */
function factCondition(name, value) {
  // A JSON pointer (RFC 6901) takes names of any letters.
  const path = literal(`/${name.replaceAll("~", "~0").replaceAll("/", "~1")}`);
  const text = `json_extract_string(info, ${path})`;
  if (!/^-?\d+(\.\d+)?([eE][+-]?\d+)?$/.test(value)) return `${text} = ${literal(value)}`;
  // One float has several texts: what Python writes as 1.0 and 1e+16 is here 1 and 10000000000000000.
  const isSameFloat = `json_type(info, ${path}) = 'DOUBLE' AND TRY_CAST(${text} AS DOUBLE) = TRY_CAST('${value}' AS DOUBLE)`;
  return `(${text} = '${value}' OR (${isSameFloat}))`;
}

/**
 * The SQL condition of a filter; "": none. A condition that ends with a comment is on lines of its own.
 *
 * @param {Filter} filter
 * @param {readonly string[]} [columns] Columns that are part of the condition.
 */
export function conditionOf({ where, facts, since, until, ...filter }, columns = COLUMNS) {
  const parts = COLUMNS.filter((name) => columns.includes(name) && filter[name]).map(
    (name) => `${name} = ${literal(filter[name])}`,
  );
  if (since) parts.push(`end_time >= make_timestamp(${since}000)`);
  if (until) parts.push(`end_time < make_timestamp(${until}000)`);
  parts.push(...Object.entries(facts).map(([name, value]) => factCondition(name, String(value))));
  if (where) parts.unshift(parts.length ? `(${where}\n)` : where);
  return parts.join(" AND ");
}

/** @param {Filter} filter Parameters of a request that lists episodes: source and status need no SQL. */
export function requestQuery(filter) {
  const { source, status } = filter;
  return { source, status, where: conditionOf(filter, ["split"]) };
}

/**
 * Rows of a table answer as objects.
 *
 * @param {{columns: string[], rows: any[][]}} answer
 * @returns {Episode[]}
 */
export function episodesOf({ columns, rows }) {
  return rows.map((values) => {
    const episode = Object.fromEntries(columns.map((name, number) => [name, values[number]]));
    const { info } = episode;
    const facts = typeof info === "string" ? parseJson(info) : (info ?? {});
    return { ...episode, info: ownFacts(facts), marks: facts._selections ?? {} };
  });
}

/** @param {Record<string, any>} facts @returns {Record<string, any>} Those that are not the store's own. */
export function ownFacts(facts) {
  return Object.fromEntries(Object.entries(facts).filter(([name]) => !name.startsWith("_")));
}

/**
 * @param {string} store
 * @param {number} id
 * @param {AbortSignal} [signal]
 * @returns {Promise<Episode | null>} Null: there is no such episode.
 */
export async function getEpisode(store, id, signal) {
  const answer = await getJson(storePath(store, "/episodes"), { query: { after: id - 1, limit: 1 }, signal });
  return episodesOf(answer).find((episode) => episode.episode_id === id) ?? null;
}

/**
 * Return the id of the next episode under a filter, or of the previous one.
 *
 * @param {string} store
 * @param {Episode} episode
 * @param {Filter} filter
 * @param {1 | -1} direction
 * @param {boolean} sql Whether the server answers SQL; without it only `source` and `status` select.
 * @param {AbortSignal} signal
 * @returns {Promise<number | null>}
 */
export async function neighbourOf(store, episode, filter, direction, sql, signal) {
  const id = episode.episode_id;
  const path = storePath(store, "/episodes");
  const { source, status, where: condition } = requestQuery(filter);
  const named = filter.order.replace(/^-/, "");
  const column = named in episode && named !== "info" ? named : "episode_id";
  const descending = filter.order.startsWith("-");
  const forward = descending ? direction === -1 : direction === 1;
  if (!sql || (condition === "" && column === "episode_id")) {
    // Near neighbours need no condition, whose first query takes the server some time.
    const query = forward ? { after: id, limit: 1 } : { after: Math.max(0, id - 1 - NEAR), limit: NEAR };
    const found = episodesOf(await getJson(path, { query: { ...query, source, status }, signal }));
    const ids = found.map((one) => one.episode_id).filter((one) => (forward ? one > id : one < id));
    const nearest = (forward ? ids[0] : ids.at(-1)) ?? null;
    if (!sql || forward || nearest !== null) return nearest;
  }
  const beyond = forward ? ">" : "<";
  const own = identifier("episode_id");
  const key = identifier(column);
  const value = literal(episode[column]);
  // NULL comes last in either direction.
  const behind = direction === 1 ? ` OR ${key} IS NULL` : "";
  const after =
    column === "episode_id"
      ? `${own} ${beyond} ${id}`
      : episode[column] === null
        ? `${key} IS NULL AND ${own} ${beyond} ${id}`
        : `(${key} ${beyond} ${value} OR (${key} = ${value} AND ${own} ${beyond} ${id})${behind})`;
  const answer = await getJson(path, {
    query: {
      source,
      status,
      where: condition ? `(${condition}\n) AND ${after}` : after,
      order: `${forward ? "" : "-"}${column}`,
      limit: 1,
    },
    signal,
  });
  return episodesOf(answer)[0]?.episode_id ?? null;
}

/**
 * Change facts of an episode.
 *
 * @param {string} store
 * @param {number} id
 * @param {Record<string, any>} changes A fact of null is removed.
 * @param {AbortSignal} [signal]
 * @returns {Promise<Record<string, any>>} All facts of the episode.
 */
export async function changeFacts(store, id, changes, signal) {
  const response = await request(storePath(store, `/episodes/${id}`), {
    method: "PATCH",
    body: { info: changes },
    signal,
  });
  return ownFacts((await readJson(response)).info ?? {});
}

/**
 * Read a fact that was typed: JSON where the text is JSON, otherwise the text.
 *
 * @param {string} text
 * @returns {any}
 */
export function parseFact(text) {
  try {
    const value = JSON.parse(text);
    // A number that would change by its conversion stays a text, and so does null, which would remove the fact.
    const isExact =
      typeof value !== "number" ||
      (Number.isFinite(value) && (!Number.isInteger(value) || Number.isSafeInteger(value)));
    return value === null || !isExact ? text : value;
  } catch {
    return text;
  }
}

/** @param {any} value The text that `parseFact` reads as this value. */
export function formatFact(value) {
  if (typeof value !== "string") return JSON.stringify(value);
  return parseFact(value) === value ? value : JSON.stringify(value);
}
