// @ts-check
/** Groups, splits, selections, annotations, consumers and lineage of a store, of the episodes of a filter. */

import { storeHref } from "../addresses.js";
import { readJson, request, storePath } from "../client.js";
import { emptyState, errorState, h, linked, relativeTime, replace } from "../dom.js";
import { conditionOf, hasFilter, literal, writeFilter } from "../episode_data.js";
import { coloursOf, swatch } from "../facets.js";
import { createFilter } from "../filter.js";
import { integer, number } from "../format.js";
import { table } from "../table.js";

/** Rows of a list. */
const MOST_ROWS = 200;

/**
 * @typedef {object} List
 * @property {string} name
 * @property {string} title
 * @property {(condition: string) => string} query For the episodes that meet a condition.
 * @property {import("../table.js").Column[]} columns
 * @property {string} hint What makes such rows.
 * @property {(row: any) => string | null} [episodes] The condition of a row's episodes.
 * @property {boolean} [isWhole] Whether the filter makes no difference.
 */

const chosen = (/** @type {string} */ condition) => `SELECT episode_id FROM episodes WHERE (\n${condition}\n)`;
const count = (/** @type {string} */ key, /** @type {string} */ title) => ({
  key,
  title,
  isNumber: true,
  draw: (/** @type {any} */ row) => integer(row[key]),
});
const measured = (/** @type {string} */ key, /** @type {string} */ title) => ({
  key,
  title,
  isNumber: true,
  draw: (/** @type {any} */ row) => number(row[key]),
});
const text = (/** @type {string} */ key, /** @type {string} */ title) => ({
  key,
  title,
  draw: (/** @type {any} */ row) =>
    row[key] === null ? "" : h("bdi", { title: String(row[key]).slice(0, 1000) }, linked(row[key], 60)),
});
const when = (/** @type {string} */ key, /** @type {string} */ title) => ({
  key,
  title,
  draw: (/** @type {any} */ row) => (row[key] === null ? "" : relativeTime(row[key])),
});

/** @type {List[]} */
const LISTS = [
  {
    name: "groups",
    title: "Groups",
    query: (condition) => `SELECT * FROM groups
WHERE list_has_any(members, (SELECT list(episode_id) FROM (${chosen(condition)}))) ORDER BY group_id DESC`,
    columns: [
      count("group_id", "Group"),
      text("key", "Key"),
      text("status", "Status"),
      text("reason", "Reason"),
      count("size", "Members"),
      measured("mean_return", "Mean return"),
      measured("std_return", "Deviation"),
      text("min_version", "Oldest version"),
      when("end_time", "Ended"),
    ],
    hint: "Stores have groups if they are opened with EpisodeKeys(group=).",
    episodes: (row) => `episode_id IN (${row.members.map(Number).join(", ")})`,
  },
  {
    name: "splits",
    title: "Splits",
    query: (condition) => `SELECT split, count(*) AS episodes, sum(length)::BIGINT AS rows, avg("return") AS mean,
max(end_time) AS ended FROM episodes WHERE (\n${condition}\n) GROUP BY split ORDER BY episodes DESC`,
    columns: [
      text("split", "Split"),
      count("episodes", "Episodes"),
      count("rows", "Rows"),
      measured("mean", "Mean return"),
      when("ended", "Newest row"),
    ],
    hint: "Rows belong to the split train unless their writer names another one.",
    episodes: (row) => `split = ${literal(row.split)}`,
  },
  {
    name: "selections",
    title: "Selections",
    query: (condition) => `SELECT s.*, (SELECT count(*) FROM episodes WHERE list_contains(selections, s.name)
AND (\n${condition}\n)) AS matching FROM selections AS s ORDER BY name`,
    columns: [
      text("name", "Selection"),
      count("matching", "Episodes of this filter"),
      count("episodes", "Episodes"),
      count("excluded", "Excluded"),
      text("condition", "Condition"),
      text("author", "By"),
      text("reason", "Reason"),
      when("created", "Created"),
    ],
    hint: "The page Episodes saves a filter as a selection, and so does rb.selections.create.",
    episodes: (row) => `list_contains(selections, ${literal(row.name)})`,
  },
  {
    name: "annotations",
    title: "Annotations",
    query: (condition) => `SELECT field, author, count(*) AS count, count(DISTINCT id) AS rows, max(time) AS newest
FROM annotations WHERE id IN (SELECT _id FROM transitions WHERE _episode IN (${chosen(condition)}))
GROUP BY field, author ORDER BY newest DESC`,
    columns: [
      text("field", "Field"),
      text("author", "By"),
      count("count", "Values"),
      count("rows", "Rows"),
      when("newest", "Newest"),
    ],
    hint: "rb.annotate gives values to rows that are stored already.",
  },
  {
    name: "consumers",
    title: "Consumers",
    query: (
      condition,
    ) => `SELECT consumer, e.source, count(*) AS drawn, count(DISTINCT d.id) AS rows, max(d.time) AS newest
FROM draws AS d JOIN transitions AS t ON t._id = d.id JOIN episodes AS e ON e.episode_id = t._episode
WHERE e.episode_id IN (${chosen(condition)}) GROUP BY consumer, e.source ORDER BY consumer, drawn DESC`,
    columns: [
      text("consumer", "Consumer"),
      text("source", "Source"),
      count("drawn", "Draws"),
      count("rows", "Rows"),
      when("newest", "Newest draw"),
    ],
    hint: "Consumers are named positions of learners: rb.consumer. How far they are is on the overview.",
    episodes: (row) => `source = ${literal(row.source)}`,
  },
  {
    name: "lineage",
    title: "Lineage",
    query: () => "SELECT * FROM lineage ORDER BY number DESC",
    columns: [
      text("kind", "Step"),
      count("rows", "Rows"),
      text("program", "Program"),
      { key: "git_commit", title: "Commit", draw: (row) => (row.git_commit ?? "not recorded").slice(0, 12) },
      text("source", "Source"),
      text("facts", "Facts"),
      when("time", "When"),
    ],
    hint: "Each program that writes rows is a step.",
    isWhole: true,
  },
];

/** @param {Record<string, string>} params */
export function title(params) {
  return `Lists · ${params.store}`;
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, context) {
  const { params, query, setQuery, server, signal } = context;
  const { store } = params;
  if (!server.sql) {
    replace(
      root,
      h("h1", null, "Lists"),
      emptyState("This server does not answer SQL.", "Start it without --no-sql to see lists of a store."),
    );
    return;
  }
  let list = LISTS.find(({ name }) => name === query.get("of")) ?? LISTS[0];
  const filter = createFilter(context, { onChange: () => load() });
  const tabs = h("nav.row", { "aria-label": "Lists" });
  const body = h("section.card", { "aria-live": "off" });
  const drawTabs = () =>
    replace(
      tabs,
      LISTS.map((one) =>
        h(
          "button",
          {
            type: "button",
            class: one === list ? "primary" : null,
            "aria-pressed": String(one === list),
            click: () => {
              list = one;
              setQuery({ of: one.name === LISTS[0].name ? "" : one.name }, { push: true });
              drawTabs();
              load();
            },
          },
          one.title,
        ),
      ),
    );
  let attempt = new AbortController();
  async function load() {
    attempt.abort();
    attempt = new AbortController();
    const both = AbortSignal.any([signal, attempt.signal]);
    const { where } = filter.current();
    replace(body, h("p.loading", { role: "status" }, "Loading…"));
    try {
      const text = list.query(conditionOf(filter.current()) || "true");
      const [response, colours] = await Promise.all([
        request(storePath(store, "/sql"), { method: "POST", body: { query: text, limit: MOST_ROWS }, signal: both }),
        coloursOf(store, "source"),
      ]);
      const { columns, rows } = await readJson(response);
      if (both.aborted) return;
      const found = rows.map((/** @type {any[]} */ row) =>
        Object.fromEntries(columns.map((/** @type {string} */ name, /** @type {number} */ at) => [name, row[at]])),
      );
      replace(body, h("h2", null, list.title), drawList(store, list, found, filter, colours));
      if (list.isWhole && hasFilter(filter.current()))
        body.append(h("p.hint", null, "This list is of the whole store, whatever the filter is."));
    } catch (/** @type {any} */ error) {
      if (both.aborted) return;
      if (where && error.status >= 400 && error.status < 500) {
        filter.showError(error);
        replace(body, h("p.soft", null, "The condition above cannot be used."));
      } else replace(body, errorState(error));
    }
  }
  replace(root, h("h1", null, "Lists"), tabs, filter.element, body);
  drawTabs();
  await load();
}

/**
 * @param {string} store @param {List} list @param {any[]} rows
 * @param {ReturnType<typeof createFilter>} filter @param {import("../facets.js").Colours} colours
 */
function drawList(store, { title: name, columns, hint, episodes }, rows, filter, colours) {
  if (!rows.length)
    return emptyState(
      hasFilter(filter.current()) ? `${name}: nothing matches the filter.` : `${name}: there are none.`,
      hint,
    );
  const query = (/** @type {any} */ row) => {
    const own = /** @type {(row: any) => string} */ (episodes)(row);
    const { where } = filter.current();
    return writeFilter({ ...filter.current(), where: where ? `(${where}\n) AND ${own}` : own, order: "return" });
  };
  const links = {
    key: "links",
    title: "",
    draw: (/** @type {any} */ row) => [
      h("a", { href: storeHref(store, "/episodes", query(row)) }, "episodes"),
      " ",
      h("a", { href: storeHref(store, "/pair", query(row)) }, "best beside worst"),
    ],
  };
  const coloured = columns.map((column) =>
    column.key === "source" && episodes
      ? { ...column, draw: (/** @type {any} */ row) => [swatch(colours(row.source)), " ", column.draw?.(row)] }
      : column,
  );
  return table({ label: name, rows, columns: [...coloured, ...(episodes ? [links] : [])] });
}
