// @ts-check
/** One store: its size, the returns and lengths of its episodes, its fields, histograms, sessions and versions. */

import { storeHref } from "../addresses.js";
import { getJson, isHandled, storePath } from "../client.js";
import { histogram, histogramData, lineChart } from "../chart.js";
import { announce, choice, emptyState, errorState, h, refresh, replace } from "../dom.js";
import { bytes, cell, compact, duration, integer, number, time } from "../format.js";
import { repeat, watch } from "../live.js";
import {
  fetchSeries,
  groupChoices,
  groupCondition,
  nameOf,
  rangeCondition,
  readSmoothing,
  shorten,
  smoothingSlider,
  toLines,
  X_CHOICES,
} from "../series.js";
import { facts, table } from "../table.js";

/** Milliseconds between two summaries, and between two requests for the series. `live.js` says why pages poll. */
const SUMMARY_PAUSE = 2000;
const SERIES_PAUSE = 4000;
/** The server may answer with series that are this old, in milliseconds. */
const ANSWER_AGE = 5000;
/** Without an event the page asks for each fifth summary only. */
const QUIET_PAUSES = 5;
const HEIGHT = 230;

/** @param {Record<string, string>} params */
export function title({ store }) {
  return store;
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, context) {
  const { params, signal } = context;
  const summary = await getSummary(params.store, signal);
  const head = h("div");
  const series = h("section.card", { "aria-labelledby": "series-title" });
  const parts = SECTIONS.map((section) => ({
    ...section,
    place: h("section.card", { "aria-label": section.title, hidden: true }),
  }));
  const ages = histogramCard(
    "Ages of the rows",
    "Seconds since they were written; the rows that can be sampled.",
    signal,
  );
  const priorities = histogramCard("Priorities", "Of the rows that can be sampled.", signal);
  const sampled = histogramCard("Times sampled", "How often each row was drawn.", signal);
  replace(
    root,
    head,
    series,
    h("div.grid", null, ages.element, priorities.element, sampled.element),
    h(
      "div.split",
      null,
      parts.map((part) => part.place),
    ),
  );

  const show = (/** @type {any} */ now) => {
    refresh(head, [now, "head"], () => heading(now, context.params.store));
    ages.show(now.ages);
    priorities.show(now.priorities);
    sampled.show(now.times_sampled);
    for (const { place, read, build, title: text } of parts) {
      const data = read(now);
      place.hidden = data === null;
      if (data !== null) refresh(place, data, () => [h("h2", null, text), build(data, params.store)]);
    }
  };
  show(summary);
  const curves = new Curves(series, context);
  await curves.start();

  let [written, ended, hasGrown, pauses] = [summary.written, endedOf(summary), false, 0];
  watch(
    params.store,
    () => {
      hasGrown = true;
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
        h("span.badge", { title: `${name}: ${cell(value)}` }, `${shorten(name, 30)}: ${shorten(cell(value), 40)}`),
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
      ["Rows/s in", rates.rows_in === null ? "–" : compact(rates.rows_in)],
      ["Rows/s sampled here", rates.rows_out === null ? "–" : compact(rates.rows_out)],
      ["On disk", `${bytes(now.bytes)} (${bytes(now.free_bytes)} free)`],
      ["Opened", `${integer(now.generation)}×`],
    ]),
  ];
}

function endings(/** @type {any} */ episodes) {
  const parts = ["terminated", "truncated", "cut"].filter((status) => episodes[status]);
  return parts.length ? parts.map((status) => `${compact(episodes[status])} ${status}`).join(", ") : "–";
}

/**
 * A card with a histogram, hidden while there is nothing to show.
 *
 * @param {string} text @param {string} hint @param {AbortSignal} signal
 */
function histogramCard(text, hint, signal) {
  const place = h("div");
  const element = h(
    "section.card",
    { "aria-label": text, hidden: true },
    h("h2", null, text),
    h("p.hint", null, hint),
    place,
  );
  /** @type {any} */
  let chart = null;
  return {
    element,
    show(/** @type {{edges: number[], counts: number[]} | null} */ data) {
      element.hidden = data === null;
      if (data === null) return;
      if (chart === null) {
        chart = histogram(place, { title: text, ...data, signal });
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
      { key: "layout", title: "Layout", draw: (row) => row.layout ?? "–" },
      { key: "bytes", title: "Size", isNumber: true, draw: (row) => bytes(row.bytes) },
      { key: "bar", title: "", draw: (row) => bar(row.bytes ?? 0, most) },
    ],
  });
}

/** @param {number} value @param {number} most */
function bar(value, most) {
  const fill = h("span");
  fill.style.width = `${(100 * value) / most}%`;
  return h("span.bar", { "aria-hidden": "true" }, fill);
}

/** @param {any} data */
function writingFacts({ durability, unsynced, age, seconds, shipped, limiter, read_only: readOnly }) {
  const promise = {
    sync: "sync: every extend survives a power cut",
    process: "process: every extend survives kill -9",
  }[/** @type {string} */ (durability)];
  return [
    readOnly
      ? h("p.hint", null, "This server only reads the store; what its writer has not told others is unknown.")
      : null,
    facts([
      ["Durability", promise ?? "–"],
      ["Unsynced rows", integer(unsynced)],
      ["Last sync", age === null ? "–" : `${duration(age)} ago, took ${duration(seconds)}`],
      ...(shipped
        ? [
            ["Shipped to", shipped.url],
            ["Not shipped", `${integer(shipped.rows_behind)} rows, ${duration(shipped.seconds_behind)}`],
            ["Last problem", shipped.last_error ?? "–"],
          ]
        : []),
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
      { key: "started", title: "Started", draw: (row) => time(row.started * 1000) },
      {
        key: "ended",
        title: "Ended",
        draw: (row) => (row.ended === null ? "may still write" : time(row.ended * 1000)),
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
  if (!found) return "–";
  const text = Object.entries(found)
    .map(([name, value]) => `${name}: ${cell(value)}`)
    .join(" · ");
  return h("span", { title: text }, shorten(text, 160));
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
      { key: "time", title: "Made", draw: (row) => time(row.time * 1000) },
    ],
  });
}

/** What the charts show; names of lines without groups. @type {Record<string, string>} */
const TITLES = { return: "Return of episodes", length: "Length of episodes", throughput: "Rows written per second" };
/** @type {Record<string, string>} */
const YNAMES = { return: "mean return", length: "mean length", throughput: "rows/s" };

/** Returns, lengths and throughput, and the range of them that the reader has chosen. */
class Curves {
  /** @param {HTMLElement} place @param {import("../app.js").Context} context */
  constructor(place, context) {
    const { query } = context;
    this.place = place;
    this.context = context;
    this.store = context.params.store;
    /**
     * When the store was seen to have changed, until the series are newer than that.
     *
     * @type {number | null}
     */
    this.changedAt = null;
    this.by = query.get("by") ?? "none";
    this.x = X_CHOICES.some(([value]) => value === query.get("x")) ? /** @type {string} */ (query.get("x")) : "episode";
    this.weight = readSmoothing(query.get("smooth"));
    const [from, to] = ["from", "to"].map((name) => (query.get(name) ? Number(query.get(name)) : NaN));
    /** @type {[number, number] | null} */
    this.range = from <= to ? [from, to] : null;
    /** @type {Record<string, any>} */
    this.charts = {};
    /** @type {Record<string, any>} */
    this.answers = {};
    this.request = new AbortController();
    this.choices = h("div.row");
    this.error = h("div");
    this.selection = h("div.selection");
    this.places = { return: h("div"), length: h("div"), throughput: h("div") };
  }

  async start() {
    const { signal } = this.context;
    const slider = smoothingSlider(
      this.weight,
      (weight) => {
        this.weight = weight;
        this.draw();
      },
      (smooth) => this.context.setQuery({ smooth }),
    );
    this.groups = h(
      "span",
      null,
      choice("Group by", [["none", "Nothing"]], this.by, (by) => this.change({ by })),
    );
    replace(
      this.place,
      h(
        "div.heading",
        null,
        h("h2", { id: "series-title" }, "Episodes"),
        h("a", { href: storeHref(this.store, "/episodes") }, "List all"),
      ),
      h(
        "div.row.controls",
        null,
        this.groups,
        choice("Over", X_CHOICES, this.x, (x) => {
          this.setRange(null);
          this.change({ x });
        }),
        slider,
      ),
      this.error,
      h(
        "div.grid",
        null,
        h("div", null, h("h3", null, "Return"), this.places.return),
        h("div", null, h("h3", null, "Length in steps"), this.places.length),
      ),
      this.selection,
      h("h3", null, "Rows written per second"),
      this.places.throughput,
    );
    if (this.context.server.sql || this.by === "none") this.fillChoices();
    await this.load();
    repeat(
      SERIES_PAUSE,
      async () => {
        const { changedAt } = this;
        if (changedAt === null) return;
        const isNewer = performance.now() - changedAt >= ANSWER_AGE;
        await this.load();
        if (isNewer && this.changedAt === changedAt) this.changedAt = null;
      },
      signal,
    );
  }

  async fillChoices() {
    try {
      const found = await groupChoices(this.store, this.context.signal);
      replace(
        this.groups,
        choice("Group by", found, this.by, (by) => this.change({ by })),
      );
    } catch {
      // Without a list of facts the episodes can still be drawn together.
    }
  }

  /** @param {{by?: string, x?: string}} changes */
  change({ by = this.by, x = this.x }) {
    this.by = by;
    this.x = x;
    this.context.setQuery({ by: by === "none" ? "" : by, x: x === "episode" ? "" : x });
    this.load();
  }

  /** Ask for the series, and draw them. */
  async load() {
    this.request.abort();
    const request = new AbortController();
    this.request = request;
    const signal = AbortSignal.any([request.signal, this.context.signal]);
    try {
      const ask = (/** @type {any} */ query) => fetchSeries(this.store, query, signal);
      const [returns, lengths, throughput] = await Promise.all([
        ask({ y: "return", by: this.by, x: this.x }),
        ask({ y: "length", by: this.by, x: this.x }),
        ask({ y: "throughput", x: "time", points: 300 }),
      ]);
      this.answers = { return: returns, length: lengths, throughput };
      replace(this.error);
      this.draw();
    } catch (error) {
      if (signal.aborted) return;
      if (isHandled(error)) return;
      replace(this.error, errorState(error));
    }
  }

  draw() {
    const { signal } = this.context;
    const xLabel = { episode: "episode", rows: "rows written", time: "time" }[this.x];
    for (const y of ["return", "length", "throughput"]) {
      const answer = this.answers[y];
      if (!answer) continue;
      const place = this.places[/** @type {"return"} */ (y)];
      const groups = answer.groups.filter((/** @type {any} */ group) => group.x.length);
      if (!groups.length) {
        delete this.charts[y];
        replace(
          place,
          y === "throughput"
            ? h("p.soft", null, "Nothing was written yet.")
            : emptyState(
                "No episode has ended yet.",
                "Curves begin with the first row that is terminated or truncated. This page shows them as they come.",
              ),
        );
        continue;
      }
      const isTime = y === "throughput" || this.x === "time";
      const { x, series } = toLines(
        this.by === "none" || y === "throughput"
          ? groups.map((/** @type {any} */ group) => ({ ...group, label: YNAMES[y] }))
          : groups,
        y === "throughput" ? 0 : this.weight,
      );
      if (this.charts[y] && this.charts[y].isTime === isTime && this.charts[y].xLabel === xLabel) {
        this.charts[y].chart.setData(x, series);
      } else {
        const chart = lineChart(place, {
          title: TITLES[y],
          x,
          series,
          isTime,
          xLabel: y === "throughput" ? "time" : xLabel,
          height: y === "throughput" ? 130 : HEIGHT,
          signal,
          sync: y === "throughput" ? undefined : "episodes",
          onSelect: y === "throughput" ? undefined : (at) => this.setRange(around(x, at)),
          onRange: y === "throughput" ? undefined : (low, high) => this.setRange([low, high]),
        });
        this.charts[y] = { chart, isTime, xLabel };
      }
      if (y !== "throughput") this.charts[y].chart.setRange(...(this.range ?? [null, null]));
    }
    this.drawSelection();
  }

  /** @param {[number, number] | null} range */
  setRange(range) {
    this.range = range && [Math.round(Math.min(...range)), Math.round(Math.max(...range))];
    this.context.setQuery({ from: this.range?.[0] ?? "", to: this.range?.[1] ?? "" });
    for (const y of ["return", "length"]) this.charts[y]?.chart.setRange(...(this.range ?? [null, null]));
    this.drawSelection();
    if (this.range) announce(`${this.describe()} chosen`);
  }

  describe() {
    const [from, to] = /** @type {[number, number]} */ (this.range);
    if (this.x === "time") return `Episodes that ended from ${time(from)} to ${time(to)}`;
    return this.x === "rows"
      ? `Episodes that ended within rows ${integer(from)} to ${integer(to)}`
      : `Episodes ${integer(from)} to ${integer(to)}`;
  }

  /** The chosen range: a link to its episodes, and what each group did in it. */
  drawSelection() {
    refresh(this.selection, [this.range, this.x, this.by, this.range && this.answers.return], () => {
      const bounds = h("form.row", {
        submit: (/** @type {Event} */ event) => {
          event.preventDefault();
          this.setRange([this.parse(low.value), this.parse(high.value)]);
        },
      });
      const type = this.x === "time" ? "datetime-local" : "number";
      const low = h("input", {
        type,
        step: 1,
        required: true,
        "aria-label": "From",
        value: this.range ? this.write(this.range[0]) : "",
      });
      const high = h("input", {
        type,
        step: 1,
        required: true,
        "aria-label": "To",
        value: this.range ? this.write(this.range[1]) : "",
      });
      bounds.append(low, h("span", null, "to"), high, h("button", { type: "submit" }, "Choose"));
      if (!this.range)
        return [h("p.hint", null, "Drag over a chart, click into it, or type a range to see its episodes."), bounds];
      const where = rangeCondition(this.x, ...this.range);
      const groups = this.by === "none" ? [] : this.inRange(this.range);
      return [
        h(
          "div.row",
          null,
          h("strong", null, this.describe()),
          h(
            "a.button.primary",
            { href: storeHref(this.store, "/episodes", { where, order: "return" }) },
            "Show these episodes",
          ),
          h("button", { type: "button", click: () => this.setRange(null) }, "Choose none"),
        ),
        bounds,
        groups.length
          ? table({
              label: "Groups in this range, the lowest return first",
              rows: groups,
              columns: [
                { key: "name", title: "Group", draw: (row) => this.linkOf(row, where) },
                { key: "count", title: "Episodes", isNumber: true, draw: (row) => integer(row.count) },
                { key: "mean", title: "Mean return", isNumber: true, draw: (row) => number(row.mean) },
                { key: "min", title: "Lowest", isNumber: true, draw: (row) => number(row.min) },
              ],
            })
          : null,
      ];
    });
  }

  /** @param {any} row @param {string} where */
  linkOf(row, where) {
    if (row.other) return nameOf(row);
    return h(
      "a",
      {
        href: storeHref(this.store, "/episodes", {
          where: `${where} AND ${groupCondition(this.by, row.name)}`,
          order: "return",
        }),
      },
      shorten(nameOf(row)),
    );
  }

  /** Episodes and returns of each group in a range, the lowest mean first. @param {[number, number]} range */
  inRange([from, to]) {
    const groups = this.answers.return?.groups ?? [];
    return groups
      .map((/** @type {any} */ group) => {
        const at = group.x
          .map((/** @type {number} */ _, /** @type {number} */ number) => number)
          .filter(
            (/** @type {number} */ number) =>
              group.x[number] >= from && group.x[number] <= to && group.mean[number] !== null,
          );
        const count = at.reduce(
          (/** @type {number} */ sum, /** @type {number} */ number) => sum + group.count[number],
          0,
        );
        return {
          name: group.name,
          other: group.other,
          count,
          mean: count
            ? at.reduce(
                (/** @type {number} */ sum, /** @type {number} */ number) =>
                  sum + group.mean[number] * group.count[number],
                0,
              ) / count
            : null,
          min: at.length ? Math.min(...at.map((/** @type {number} */ number) => group.min[number])) : null,
        };
      })
      .filter((/** @type {any} */ row) => row.count)
      .sort((/** @type {any} */ one, /** @type {any} */ other) => one.mean - other.mean);
  }

  /** @param {string} text @returns {number} */
  parse(text) {
    return this.x === "time" ? new Date(text).getTime() : Number(text);
  }

  /** @param {number} value */
  write(value) {
    return this.x === "time" ? time(value).replace(" ", "T") : String(value);
  }
}

/**
 * The range of values that are nearest to one of them.
 *
 * @param {number[]} x Ascending.
 * @param {number} at
 * @returns {[number, number]}
 */
export function around(x, at) {
  const nearest = x.reduce((best, value, number) => (Math.abs(value - at) < Math.abs(x[best] - at) ? number : best), 0);
  const [before, here, after] = [x[nearest - 1] ?? x[nearest] - 1, x[nearest], x[nearest + 1] ?? x[nearest] + 1];
  return [Math.ceil((before + here) / 2), Math.floor((here + after) / 2)];
}
