// @ts-check
/** All stores of the server, with their sizes and returns; some of them can be chosen to compare. */

import { href, storeHref } from "../addresses.js";
import { ApiError, getJson, isHandled, storePath } from "../client.js";
import { drawFirstChanges } from "../changes.js";
import { sparkline } from "../chart.js";
import { announce, debounce, emptyState, h, refresh, replace } from "../dom.js";
import { bytes, cell, compact, integer, number, shorten } from "../format.js";
import { repeat } from "../live.js";
import { fetchSeries } from "../series.js";
import { table } from "../table.js";

/** Most stores that are asked for their summaries, and most that are compared. */
const MOST_ROWS = 50;
const MOST_COMPARED = 8;
/** Milliseconds between two looks at all stores, and calls after which returns are asked for again. */
const PAUSE = 5000;
const RETURNS_EVERY = 6;
const REQUESTS = 4;
/** Most stores whose strongest change is shown. */
const MOST_CHANGES = 12;

export function title() {
  return "Stores";
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, context) {
  const { server, query, setQuery, signal } = context;
  if (!server.stores.length) {
    replace(
      root,
      h("h1", null, "Stores"),
      emptyState(
        "There are no stores here yet.",
        "Write one into the folder that this server reads: ",
        h("code", null, 'expstore.open("run.exp")'),
        " makes one in Python, ",
        h("code", null, "expstore collect CartPole-v1 run.exp"),
        " in a shell. Then reload this page.",
      ),
    );
    return;
  }
  const chosen = new Set((query.get("pick") ?? "").split(",").filter((name) => server.stores.includes(name)));
  const order = { by: query.get("order") ?? "name" };
  /** @type {Map<string, any>} */
  const known = new Map();
  const list = h("div");
  const changes = h("section");
  const compare = h("div.row");
  const count = h("span.soft");
  const search = h("input", {
    type: "search",
    value: query.get("q") ?? "",
    "aria-label": "Filter by name",
    placeholder: "Filter by name",
    size: 24,
    input: debounce(200, () => {
      setQuery({ q: search.value });
      look().catch((error) => {
        if (!signal.aborted && !isHandled(error)) throw error;
      });
    }),
  });
  replace(
    root,
    h("div.heading", null, h("h1", null, "Stores"), count),
    h("div.row", null, search, compare),
    list,
    changes,
  );

  const names = () => server.stores.filter((name) => name.toLowerCase().includes(search.value.trim().toLowerCase()));
  const draw = () => {
    const found = names();
    count.textContent =
      found.length > MOST_ROWS
        ? `the first ${MOST_ROWS} of ${integer(found.length)}: filter by name to see others`
        : found.length === server.stores.length
          ? integer(found.length)
          : `${integer(found.length)} of ${integer(server.stores.length)}`;
    const rows = found.slice(0, MOST_ROWS).map((name) => ({ name, ...known.get(name) }));
    refresh(list, [rows, order.by, chosen.size >= MOST_COMPARED], () =>
      rows.length
        ? table({
            label: "Stores",
            columns,
            rows: sort(rows, order.by),
            order: order.by,
            onSort: (by) => {
              order.by = by;
              setQuery({ order: by });
              draw();
            },
          })
        : emptyState("No store has such a name.", "Change the filter above."),
    );
    refresh(compare, [...chosen], () =>
      chosen.size
        ? [
            h(
              "a.button",
              { href: href("/compare", { stores: [...chosen].join(",") }) },
              `Compare ${chosen.size} ${chosen.size === 1 ? "store" : "stores"}`,
            ),
            h("button", { type: "button", click: () => choose([...chosen], false) }, "Choose none"),
          ]
        : h("span.soft", null, `Tick up to ${MOST_COMPARED} stores to compare them.`),
    );
  };
  const choose = (/** @type {string[]} */ which, /** @type {boolean} */ on) => {
    for (const name of which)
      if (on) chosen.add(name);
      else chosen.delete(name);
    setQuery({ pick: [...chosen].join(",") });
    for (const box of /** @type {NodeListOf<HTMLInputElement>} */ (list.querySelectorAll("input[type=checkbox]")))
      box.checked = chosen.has(box.value);
    announce(`${chosen.size} chosen`);
    draw();
  };
  const columns = [
    {
      key: "pick",
      title: "",
      draw: (/** @type {any} */ row) =>
        h("input", {
          type: "checkbox",
          value: row.name,
          checked: chosen.has(row.name),
          "aria-label": `Compare ${row.name}`,
          disabled: chosen.size >= MOST_COMPARED && !chosen.has(row.name),
          change: (/** @type {any} */ event) => choose([row.name], event.target.checked),
        }),
    },
    {
      key: "name",
      title: "Store",
      canSort: true,
      draw: (/** @type {any} */ row) => h("a", { href: storeHref(row.name) }, row.name),
    },
    {
      key: "returns",
      title: "Returns",
      draw: (/** @type {any} */ row) =>
        row.error
          ? h("span.bad", { title: row.error }, shorten(row.error, 60))
          : row.returns?.length > 1
            ? [
                sparkline(
                  row.returns,
                  `Returns of ${row.name}, ${number(row.returns[0])} at first, ${number(row.last)} at last`,
                ),
                " ",
                number(row.last),
              ]
            : "",
    },
    {
      key: "episodes",
      title: "Episodes",
      isNumber: true,
      canSort: true,
      draw: (/** @type {any} */ row) => integer(row.episodes),
    },
    { key: "rows", title: "Rows", isNumber: true, canSort: true, draw: (/** @type {any} */ row) => integer(row.rows) },
    {
      key: "rate",
      title: "Rows/s",
      isNumber: true,
      canSort: true,
      draw: (/** @type {any} */ row) => compact(row.rate),
    },
    { key: "bytes", title: "Size", isNumber: true, canSort: true, draw: (/** @type {any} */ row) => bytes(row.bytes) },
    {
      key: "facts",
      title: "Facts",
      draw: (/** @type {any} */ row) => h("span.soft", { title: row.facts }, row.facts ?? ""),
    },
  ];

  let calls = 0;
  const look = async () => {
    draw();
    const waiting = names().slice(0, MOST_ROWS);
    const withReturns = calls % RETURNS_EVERY === 0;
    calls += 1;
    const work = async () => {
      for (let name = waiting.shift(); name !== undefined && !signal.aborted; name = waiting.shift()) {
        known.set(name, { ...known.get(name), ...(await describe(name, withReturns || !known.has(name), signal)) });
        draw();
      }
    };
    await Promise.all(Array.from({ length: REQUESTS }, work));
  };
  await repeat(PAUSE, look, signal);
  drawFirstChanges(changes, names().slice(0, MOST_CHANGES), context);
}

/** @param {string} name @param {boolean} withReturns @param {AbortSignal} signal */
async function describe(name, withReturns, signal) {
  try {
    const summary = await getJson(storePath(name, "/summary"), { signal });
    const found = {
      error: null,
      rows: summary.rows,
      episodes: summary.episodes.count,
      rate: summary.rates.rows_in,
      bytes: summary.bytes,
      facts: Object.entries(summary.meta ?? {})
        .filter(([, value]) => value === null || typeof value !== "object")
        .slice(0, 3)
        .map(([fact, value]) => `${shorten(fact, 20)}: ${shorten(cell(value), 30)}`)
        .join(" · "),
    };
    if (!withReturns) return found;
    const { groups } = await fetchSeries(name, { y: "return", by: "none", x: "episode", points: 40 }, signal);
    const returns = (groups[0]?.mean ?? []).filter((value) => value !== null);
    return { ...found, returns, last: returns.at(-1) };
  } catch (error) {
    if (signal.aborted || !(error instanceof ApiError) || isHandled(error)) throw error;
    return { error: error.message };
  }
}

/** @param {any[]} rows @param {string} order "-name" descends; rows without a value come last. */
export function sort(rows, order) {
  const key = order.replace(/^-/, "");
  const sign = order.startsWith("-") ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [a, b] = [one[key], other[key]];
    if (a === undefined || a === null) return 1;
    if (b === undefined || b === null) return -1;
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  });
}
