// @ts-check
/** Groups, splits, selections, annotations, consumers and lineage of a store, of the episodes of a filter. */

import { storeHref } from "../addresses.js";
import { readJson, request, storePath } from "../client.js";
import { emptyState, errorState, h, linked, relativeTime, replace } from "../dom.js";
import { conditionOf, hasFilter, literal, writeFilter } from "../episode_data.js";
import { coloursOf, swatch } from "../facets.js";
import { createFilter } from "../filter.js";
import { integer, number } from "../format.js";
import { isNumeric, isTime, table } from "../table.js";

/** Rows of a list. */
const MOST_ROWS = 200;

/**
 * @typedef {object} List
 * @property {string} name
 * @property {string} title
 * @property {(condition: string) => string} query For the episodes that meet a condition. Its columns are headings.
 * @property {string} hint What makes such rows.
 * @property {(row: any) => string} [episodes] The condition of a row's episodes.
 */

const chosen = (/** @type {string} */ condition) => `SELECT episode_id FROM episodes WHERE (\n${condition}\n)`;

/** @type {List[]} */
const LISTS = [
  {
    name: "groups",
    title: "Groups",
    query: (
      condition,
    ) => `SELECT group_id AS "Group", key AS "Key", status AS "Status", reason AS "Reason", size AS "Members",
mean_return AS "Mean return", std_return AS "Deviation", min_version AS "Oldest version", end_time AS "Ended", members
FROM groups WHERE list_has_any(members, (SELECT list(episode_id) FROM (${chosen(condition)}))) ORDER BY group_id DESC`,
    hint: 'Stores have groups if they are opened with episodes={"group": ...}.',
    episodes: (row) => `episode_id IN (${row.members.map(Number).join(", ")})`,
  },
  {
    name: "splits",
    title: "Splits",
    query: (condition) => `SELECT split AS "Split", count(*) AS "Episodes", sum(length)::BIGINT AS "Rows",
avg("return") AS "Mean return", max(end_time) AS "Newest row"
FROM episodes WHERE (\n${condition}\n) GROUP BY split ORDER BY count(*) DESC`,
    hint: "Rows belong to the split train unless their writer names another one.",
    episodes: (row) => `split = ${literal(row.Split)}`,
  },
  {
    name: "selections",
    title: "Selections",
    query: (
      condition,
    ) => `SELECT name AS "Selection", (SELECT count(*) FROM episodes WHERE list_contains(selections, s.name)
AND (\n${condition}\n)) AS "Episodes of this filter", episodes AS "Episodes", excluded AS "Excluded", condition AS "Condition",
author AS "By", reason AS "Reason", created AS "Created" FROM selections AS s ORDER BY name`,
    hint: "The page Episodes saves a filter as a selection, and so does rb.selections.create.",
    episodes: (row) => `list_contains(selections, ${literal(row.Selection)})`,
  },
  {
    name: "annotations",
    title: "Annotations",
    query: (
      condition,
    ) => `SELECT field AS "Field", author AS "By", count(*) AS "Values", count(DISTINCT id) AS "Rows", max(time) AS "Newest"
FROM annotations WHERE id IN (SELECT _id FROM transitions WHERE _episode IN (${chosen(condition)}))
GROUP BY field, author ORDER BY max(time) DESC`,
    hint: "rb.annotate gives values to rows that are stored already.",
  },
  {
    name: "consumers",
    title: "Consumers",
    query: (
      condition,
    ) => `SELECT consumer AS "Consumer", e.source AS "Source", count(*) AS "Draws", count(DISTINCT d.id) AS "Rows",
max(d.time) AS "Newest draw" FROM draws AS d JOIN transitions AS t ON t._id = d.id JOIN episodes AS e ON e.episode_id = t._episode
WHERE e.episode_id IN (${chosen(condition)}) GROUP BY consumer, e.source ORDER BY consumer, count(*) DESC`,
    hint: "Consumers are named positions of learners: rb.consumer. How far they are is on the overview.",
    episodes: (row) => `source = ${literal(row.Source)}`,
  },
  {
    name: "lineage",
    title: "Lineage of the whole store",
    query: () => `SELECT kind AS "Step", rows AS "Rows", program AS "Program", left(git_commit, 12) AS "Commit",
source AS "From", facts::VARCHAR AS "Facts", time AS "When" FROM lineage ORDER BY number DESC`,
    hint: "Each program that writes rows is a step.",
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
          one.title.split(" ")[0],
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
      const answer = await readJson(response);
      if (both.aborted) return;
      replace(body, h("h2", null, list.title), drawList(store, list, answer, filter, colours));
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
 * @param {string} store @param {List} list @param {{columns: string[], rows: any[][]}} answer
 * @param {ReturnType<typeof createFilter>} filter @param {import("../facets.js").Colours} colours
 */
function drawList(store, { title: name, hint, episodes }, { columns, rows }, filter, colours) {
  if (!rows.length)
    return emptyState(
      hasFilter(filter.current())
        ? `No ${name.toLowerCase()} match the filter.`
        : `The store has no ${name.toLowerCase()}.`,
      hint,
    );
  const query = (/** @type {any[]} */ row) => {
    const own = episodes?.(Object.fromEntries(columns.map((column, at) => [column, row[at]])));
    const { where } = filter.current();
    return writeFilter({
      ...filter.current(),
      where: where ? `(${where}\n) AND ${own}` : String(own),
      order: "return",
    });
  };
  const links = {
    key: "links",
    title: "",
    draw: (/** @type {any} */ row) => [
      h("a", { href: storeHref(store, "/episodes", query(row)) }, "episodes"),
      " ",
      h("a", { href: storeHref(store, "/pair", query(row)) }, "best and worst"),
    ],
  };
  const shown = columns.flatMap((title, at) => {
    if (title === "members") return [];
    const [isNumber, isMoment] = [isNumeric(rows, at), isTime(rows, at)];
    const draw = (/** @type {any} */ row) => {
      const value = row[at];
      if (value === null) return "";
      if (isNumber) return Number.isInteger(value) ? integer(value) : number(value);
      if (isMoment) return relativeTime(value);
      const text = h("bdi", { title: String(value).slice(0, 1000) }, linked(value, 60));
      return title === "Source" ? [swatch(colours(value)), " ", text] : text;
    };
    return [{ key: title, title, isNumber, draw }];
  });
  return table({ label: name, rows, columns: [...shown, ...(episodes ? [links] : [])] });
}
