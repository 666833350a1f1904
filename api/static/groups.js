// @ts-check
/** Groups of episodes: the worst ones of a store, and the group of an episode. */

import { storeHref } from "./addresses.js";
import { readJson, request, storePath } from "./client.js";
import { h, refresh } from "./dom.js";
import { integer, number } from "./format.js";
import { repeat } from "./live.js";
import { table } from "./table.js";

/** Groups that a store's page lists, and milliseconds until it asks again. */
const MOST = 10;
const PAUSE = 10_000;
const COLUMNS = "group_id, key, status, size, ended, mean_return, std_return, min_version, max_version";

/** @typedef {Record<string, any>} Group A row of the relation `groups`. */

/** @param {string} store @param {string} rest @param {any[]} params @param {AbortSignal} signal @returns {Promise<Group[]>} */
async function ask(store, rest, params, signal) {
  const body = { query: `SELECT ${COLUMNS} FROM groups ${rest}`, params };
  const response = await request(storePath(store, "/sql"), { method: "POST", body, signal });
  const { columns, rows } = await readJson(response);
  return rows.map((/** @type {any[]} */ row) =>
    Object.fromEntries(columns.map((/** @type {string} */ name, /** @type {number} */ at) => [name, row[at]])),
  );
}

/** @param {string} store @param {Group} group @returns {string} The address of its episodes, the lowest return first. */
export function groupHref(store, group) {
  const where = `episode_id IN (SELECT unnest(members) FROM groups WHERE group_id = ${Number(group.group_id)})`;
  return storeHref(store, "/episodes", { where, order: "return" });
}

/** @param {string} store @param {number} episode @param {AbortSignal} signal @returns {Promise<Group | null>} */
export async function groupOf(store, episode, signal) {
  return (await ask(store, "WHERE list_contains(members, ?)", [episode], signal))[0] ?? null;
}

/**
 * A card with the groups whose episodes have ended, the lowest mean return first; hidden while there is none.
 *
 * @param {import("./app.js").Context} context
 */
export function drawGroups({ params, server, signal }) {
  const { store } = params;
  const card = h("section.card", { "aria-label": "Groups", hidden: true });
  if (!server.sql) return card;
  const show = async () => {
    const order = `ORDER BY mean_return NULLS LAST, group_id DESC LIMIT ${MOST}`;
    const groups = await ask(store, `WHERE ended > 0 AND mean_return IS NOT NULL ${order}`, [], signal);
    card.hidden = groups.length === 0;
    refresh(card, groups, () => [
      h("h2", null, "Groups"),
      h("p.soft", null, `The lowest mean return first; at most ${MOST}.`),
      table({ label: "Groups", columns: columnsOf(store), rows: groups }),
    ]);
  };
  repeat(PAUSE, () => show().catch(() => {}), signal); // the next call may succeed
  return card;
}

/** @param {string} store @returns {import("./table.js").Column[]} */
function columnsOf(store) {
  const versions = (/** @type {Group} */ { min_version: low, max_version: high }) =>
    low === null ? "none" : low === high ? integer(low) : `${integer(low)} to ${integer(high)}`;
  const key = (/** @type {Group} */ group) =>
    h("a", { href: groupHref(store, group) }, h("bdi", null, group.key ?? group.group_id));
  return [
    { key: "key", title: "Group", draw: key },
    { key: "mean_return", title: "Mean return", isNumber: true, draw: (row) => number(row.mean_return) },
    { key: "std_return", title: "Deviation", isNumber: true, draw: (row) => number(row.std_return) },
    { key: "ended", title: "Ended", isNumber: true, draw: (row) => `${integer(row.ended)} of ${integer(row.size)}` },
    { key: "status", title: "Status", draw: (row) => h("span.badge", null, row.status) },
    { key: "min_version", title: "Policy version", draw: versions },
  ];
}
