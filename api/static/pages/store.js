// @ts-check
/** One store: its size, the returns and lengths of its episodes, its fields, histograms, sessions and versions. */

import { storeHref } from "../addresses.js";
import { drawChanges } from "../changes.js";
import { getJson, storePath } from "../client.js";
import { histogram, histogramData } from "../chart.js";
import { h, linked, refresh, relativeTime, replace } from "../dom.js";
import { ago, bytes, cell, compact, duration, integer, number, shorten } from "../format.js";
import { drawGroups } from "../groups.js";
import { repeat, watch } from "../live.js";
import { groupCondition } from "../series.js";
import { bar, facts, table } from "../table.js";
import { Curves } from "./store/curves.js";

/** Milliseconds between two summaries. `live.js` says why pages poll. */
const SUMMARY_PAUSE = 2000;
/** Without an event the page asks for each fifth summary only. */
const QUIET_PAUSES = 5;

/** @param {Record<string, string>} params */
export function title({ store }) {
  return store;
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, context) {
  const { params, signal } = context;
  const summary = await getSummary(params.store, signal);
  const head = h("div");
  const changes = h("section.card", { id: "changes", "aria-labelledby": "changes-title", hidden: true });
  const series = h("section.card", { "aria-labelledby": "series-title" });
  const parts = SECTIONS.map((section) => ({
    ...section,
    place: h("section.card", { "aria-label": section.title, hidden: true }),
  }));
  const ages = histogramCard("Ages of the rows", signal, true);
  const priorities = histogramCard("Priorities", signal);
  const sampled = histogramCard("Times sampled", signal);
  replace(
    root,
    head,
    series,
    changes, // below the curves, which must not move when it appears
    drawGroups(context),
    h("div.grid", null, ages.element, priorities.element, sampled.element),
    h(
      "div.split",
      null,
      parts.map((part) => part.place),
    ),
  );

  const show = (/** @type {any} */ now) => {
    refresh(head, [now, "head"], () => heading(now, context.params.store));
    ages.show(now.ages, describeAges(now.ages, now.rows));
    priorities.show(now.priorities, "Of the rows that can be sampled.");
    sampled.show(now.times_sampled, "How often each row was drawn.");
    for (const { place, read, build, title: text } of parts) {
      const data = read(now);
      place.hidden = data === null;
      if (data !== null) refresh(place, data, () => [h("h2", null, text), build(data, params.store)]);
    }
  };
  show(summary);
  const curves = new Curves(series, context, summary);
  await curves.start();
  const changesHaveGrown = drawChanges(changes, context, curves);

  let [written, ended, hasGrown, pauses] = [summary.written, endedOf(summary), false, 0];
  watch(
    params.store,
    () => {
      hasGrown = true;
      changesHaveGrown();
    },
    signal,
  );
  repeat(
    SUMMARY_PAUSE,
    async () => {
      pauses += 1;
      if (!hasGrown && pauses < QUIET_PAUSES) return;
      [hasGrown, pauses] = [false, 0];
      const now = await getSummary(params.store, signal);
      if (now.written !== written || endedOf(now) !== ended) curves.changedAt = performance.now();
      [written, ended] = [now.written, endedOf(now)];
      show(now);
    },
    signal,
  );
}

/** The summary of a store, with its consumers. @param {string} store @param {AbortSignal} signal */
async function getSummary(store, signal) {
  const [summary, { consumers }] = await Promise.all([
    getJson(storePath(store, "/summary"), { signal }),
    getJson(storePath(store, "/consumers"), { signal }),
  ]);
  return { ...summary, consumers };
}

/** @param {any} summary */
function endedOf({ episodes }) {
  return episodes.count - episodes.open;
}

/** @param {any} now @param {string} name */
function heading(now, name) {
  const left = [
    h("h1", null, name),
    h("span.badge", null, now.storage),
    now.read_only ? h("span.badge", null, "read only here") : null,
    ...Object.entries(now.meta ?? {})
      .slice(0, 8)
      .map(([name, value]) =>
        h("span.badge", { title: `${name}: ${cell(value)}` }, `${shorten(name, 30)}: `, linked(value, 40)),
      ),
  ];
  const { episodes, rates } = now;
  return [
    h("div.heading", null, left),
    facts([
      ["Rows", now.capacity === null ? integer(now.rows) : `${integer(now.rows)} of ${integer(now.capacity)}`],
      ["Written", integer(now.written)],
      ["Episodes", `${integer(episodes.count)}${episodes.open ? `, ${integer(episodes.open)} open` : ""}`],
      ["Ended by", endings(episodes)],
      ["Rows/s in", compact(rates.rows_in)],
      ["Rows/s sampled here", compact(rates.rows_out)],
      ["On disk", `${bytes(now.bytes)} (${bytes(now.free_bytes)} free)`],
      ["Opened", `${integer(now.generation)}×`],
    ]),
  ];
}

function endings(/** @type {any} */ episodes) {
  const parts = ["terminated", "truncated", "cut"].filter((status) => episodes[status]);
  return parts.length
    ? parts.map((status) => `${compact(episodes[status])} ${status}`).join(", ")
    : "no episode has ended";
}

/**
 * The ages of rows in words, in time and in rows.
 *
 * @param {{edges: number[], counts: number[]} | null} ages
 * @param {number} rows Rows that can be sampled.
 */
export function describeAges(ages, rows) {
  if (ages === null) return "";
  const total = ages.counts.reduce((sum, count) => sum + count, 0);
  let below = 0;
  const at = ages.counts.findIndex((count) => (below += count) >= total / 2);
  const half = `Half of the rows are at most ${duration(ages.edges[at + 1])} old, or ${integer(Math.ceil(rows / 2))} rows.`;
  const [newest, oldest] = [ages.edges[0], ages.edges[ages.edges.length - 1]].map(ago);
  return `The newest row was written ${newest}, the oldest ${oldest}. ${half}`;
}

/**
 * A card with a histogram, hidden while there is nothing to show.
 *
 * @param {string} text @param {AbortSignal} signal @param {boolean} [isDuration] Whether its edges are in seconds.
 */
function histogramCard(text, signal, isDuration = false) {
  const place = h("div");
  const hint = h("p.hint");
  const element = h("section.card", { "aria-label": text, hidden: true }, h("h2", null, text), hint, place);
  /** @type {any} */
  let chart = null;
  return {
    element,
    show(/** @type {{edges: number[], counts: number[]} | null} */ data, /** @type {string} */ words) {
      element.hidden = data === null;
      hint.textContent = words;
      if (data === null) return;
      if (chart === null) {
        chart = histogram(place, { title: text, isDuration, ...data, signal });
      } else {
        const { x, series } = histogramData(data.edges, data.counts);
        chart.setData(x, series);
      }
    },
  };
}

/** What is shown as tables and lists: its data out of a summary (null: nothing), and how it is drawn. */
const SECTIONS = [
  { title: "Fields", read: (/** @type {any} */ now) => now.fields, build: fieldTable },
  {
    title: "Writing",
    read: (/** @type {any} */ now) => ({
      durability: now.durability,
      unsynced: now.unsynced_rows,
      age: now.last_sync_age,
      seconds: now.last_sync_seconds,
      shipped: now.shipped,
      limiter: now.limiter,
      read_only: now.read_only,
    }),
    build: writingFacts,
  },
  {
    title: "Sessions",
    read: (/** @type {any} */ now) => (now.sessions.length ? now.sessions : null),
    build: sessionTable,
  },
  {
    title: "Consumers",
    read: (/** @type {any} */ now) => (now.consumers.length ? now.consumers : null),
    build: consumerTable,
  },
  { title: "Versions", read: (/** @type {any} */ now) => now.versions, build: versionTable },
];

/** @param {any[]} fields */
function fieldTable(fields) {
  if (!fields.length) return h("p.soft", null, "The first rows decide about the fields; none were written yet.");
  const most = Math.max(...fields.map((field) => field.bytes ?? 0), 1);
  const rows = [...fields].sort((one, other) => (other.bytes ?? 0) - (one.bytes ?? 0));
  return table({
    label: "Fields",
    rows,
    columns: [
      { key: "name", title: "Field" },
      { key: "type", title: "Type", draw: (row) => h("code", null, row.type) },
      { key: "layout", title: "Layout", draw: (row) => row.layout ?? "unknown" },
      { key: "bytes", title: "Size", isNumber: true, draw: (row) => bytes(row.bytes) },
      { key: "bar", title: "", draw: (row) => bar(row.bytes ?? 0, most) },
    ],
  });
}

/** @param {any} data */
function writingFacts({ durability, unsynced, age, seconds, shipped, limiter, read_only: readOnly }) {
  const promise = {
    sync: "sync: every extend survives a power cut",
    process: "process: every extend survives kill -9",
  }[/** @type {string} */ (durability)];
  /** @type {[string, any][]} */
  const shipping = shipped
    ? [
        ["Shipped to", shipped.url],
        ["Not shipped", `${integer(shipped.rows_behind)} rows, ${duration(shipped.seconds_behind)}`],
        ["Last problem of shipping", shipped.last_error ?? "none"],
      ]
    : [];
  return [
    readOnly
      ? h("p.hint", null, "This server only reads the store; what its writer has not told others is unknown.")
      : null,
    facts([
      ["Durability", promise ?? "unknown"],
      ["Unsynced rows", integer(unsynced)],
      ["Last sync", age === null ? "unknown" : `${ago(age)}, took ${duration(seconds)}`],
      ...shipping,
    ]),
    limiter
      ? [
          h("h3", null, "Rate limiter"),
          facts(Object.entries(limiter).map(([name, value]) => [name.replaceAll("_", " "), number(value)])),
        ]
      : h("p.soft", null, "No rate limiter: writers and samplers do not wait for each other."),
  ];
}

/** @param {any[]} sessions @param {string} store */
function sessionTable(sessions, store) {
  const withFacts = sessions.some((session) => session.provenance);
  return table({
    label: "Sessions",
    rows: sessions,
    columns: [
      {
        key: "session",
        title: "Session",
        draw: (row) =>
          h(
            "a",
            {
              href: storeHref(store, "/episodes", { where: groupCondition("session", row.session) }),
              title: row.session,
            },
            shorten(row.session, 20),
          ),
      },
      { key: "sources", title: "Sources", isNumber: true, draw: (row) => integer(row.sources) },
      { key: "started", title: "Started", draw: (row) => relativeTime(row.started * 1000) },
      {
        key: "ended",
        title: "Ended",
        draw: (row) => (row.ended === null ? "may still write" : relativeTime(row.ended * 1000)),
      },
      ...(withFacts
        ? [{ key: "provenance", title: "Provenance", draw: (/** @type {any} */ row) => provenance(row.provenance) }]
        : []),
    ],
  });
}

/** @param {any[]} consumers */
function consumerTable(consumers) {
  return table({
    label: "Consumers",
    rows: consumers,
    columns: [
      { key: "name", title: "Consumer", draw: (row) => h("span", { title: row.name }, shorten(row.name, 20)) },
      { key: "draws", title: "Draws", isNumber: true, draw: (row) => integer(row.draws) },
      { key: "committed", title: "Committed", isNumber: true, draw: (row) => integer(row.committed) },
      { key: "lag", title: "Lag", isNumber: true, draw: (row) => integer(row.draws - row.committed) },
      { key: "world", title: "Ranks", isNumber: true },
      { key: "log_bytes", title: "Log", isNumber: true, draw: (row) => bytes(row.log_bytes) },
      { key: "is_open", title: "Open", draw: (row) => (row.is_open ? "yes" : "no") },
    ],
  });
}

/** @param {Record<string, any> | null} found */
function provenance(found) {
  if (!found) return h("span.soft", null, "not recorded");
  const pairs = Object.entries(found);
  const text = pairs.map(([name, value]) => `${name}: ${cell(value)}`).join(" · ");
  const links = pairs
    .filter(([, value]) => linked(value) instanceof Node)
    .map(([, value]) => [" · ", linked(value, 60)]);
  return h("span", { title: text }, shorten(text, 160), links);
}

/** @param {any[]} versions */
function versionTable(versions) {
  if (!versions.length) {
    return h("p.soft", null, "No versions were kept. ", h("code", null, 'rb.snapshots.tag("name")'), " keeps one.");
  }
  return table({
    label: "Versions",
    rows: [...versions].reverse(),
    columns: [
      { key: "number", title: "Version", isNumber: true },
      { key: "tag", title: "Tag" },
      { key: "rows", title: "Rows", isNumber: true, draw: (row) => integer(row.rows) },
      { key: "time", title: "Made", draw: (row) => relativeTime(row.time * 1000) },
    ],
  });
}
