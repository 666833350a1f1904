// @ts-check
/** Numbers of the episodes of a store as curves, the range of them that the reader has chosen, and rows per second. */

import { storeHref } from "../../addresses.js";
import { isHandled } from "../../client.js";
import { lineChart } from "../../chart.js";
import { announce, choice, emptyState, errorState, h, linked, refresh, replace } from "../../dom.js";
import { conditionOf, hasFilter, writeFilter } from "../../episode_data.js";
import { coloursOf, swatch } from "../../facets.js";
import { createFilter } from "../../filter.js";
import { integer, number, shorten, time } from "../../format.js";
import { repeat } from "../../live.js";
import {
  fetchSeries,
  groupChoices,
  groupCondition,
  LINE_CHOICES,
  nameOf,
  numberChoices,
  rangeCondition,
  readSmoothing,
  smoothingSlider,
  toLines,
  X_CHOICES,
} from "../../series.js";
import { table } from "../../table.js";

/** Milliseconds between two requests for the series. `live.js` says why pages poll. */
const SERIES_PAUSE = 4000;
/** The server may answer with series that are this old, in milliseconds. */
const ANSWER_AGE = 5000;
const HEIGHT = 230;
/** Titles of charts. @type {Record<string, string>} */
const TITLES = { return: "Return of episodes", length: "Length of episodes" };
/** @type {Record<string, string>} */
const X_LABELS = { episode: "episode", rows: "rows written", time: "time", version: "policy version" };
/** The two charts. */
const PLACES = /** @type {const} */ (["left", "right"]);

/**
 * A mark on the curves, at the place that it has on each axis.
 *
 * @typedef {{label: string, at: Partial<Record<"episode" | "rows" | "time" | "version", number>>}} Mark
 */

/** Two numbers of episodes and the throughput, and the range of them that the reader has chosen. */
export class Curves {
  /** @param {HTMLElement} place @param {import("../../app.js").Context} context @param {any} summary */
  constructor(place, context, summary) {
    const { query } = context;
    this.place = place;
    this.context = context;
    this.store = context.params.store;
    this.fields = summary.fields;
    this.episodes = summary.episodes.count;
    this.tracker = findTracker(summary);
    /**
     * When the store was seen to have changed, until the series are newer than that.
     *
     * @type {number | null}
     */
    this.changedAt = null;
    const one = (/** @type {string} */ name, /** @type {[string, string][]} */ choices) =>
      choices.find(([value]) => value === query.get(name))?.[0] ?? choices[0][0];
    this.by = query.get("by") ?? "none";
    this.x = one("x", X_CHOICES);
    this.line = one("line", LINE_CHOICES);
    /** What the charts show. */
    this.ys = { left: query.get("left") ?? "return", right: query.get("right") ?? "length" };
    this.weight = readSmoothing(query.get("smooth"));
    const [from, to] = ["from", "to"].map((name) => (query.get(name) ? Number(query.get(name)) : NaN));
    /** @type {[number, number] | null} */
    this.range = from <= to ? [from, to] : null;
    /** @type {Mark[]} */
    this.marks = [];
    /** @type {Record<string, any>} */
    this.charts = {};
    /** @type {Record<string, any>} */
    this.answers = {};
    /** @type {import("../../facets.js").Colours} */
    this.colours = () => 0;
    /** @type {[string, string][]} */
    this.numbers = [
      ["return", "Return"],
      ["length", "Length"],
    ];
    this.request = new AbortController();
    this.filter = createFilter(context, { onChange: () => this.load() });
    this.error = h("div");
    this.selection = h("div.selection");
    this.groups = h("span");
    this.bands = h(
      "p.hint",
      { hidden: true },
      "Bands are from the 10th to the 90th percentile of the episodes of a bin.",
    );
    this.heads = { left: h("div"), right: h("div") };
    const loading = () => h("div", null, h("p.loading", null, "Loading…"));
    /** @type {Record<string, HTMLElement>} */
    this.places = { left: loading(), right: loading(), throughput: loading() };
    this.throughput = h("div", null, h("h3", null, "Rows written per second"), this.places.throughput);
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
    this.drawChoices([["none", "Nothing"]]);
    replace(
      this.place,
      h(
        "div.heading",
        null,
        h("h2", { id: "series-title" }, "Episodes"),
        h("a", { href: storeHref(this.store, "/episodes") }, "List all"),
      ),
      this.filter.element,
      h(
        "div.row.controls",
        null,
        this.groups,
        choice("Over", X_CHOICES, this.x, (x) => {
          this.range = null;
          this.change({ x });
        }),
        choice("Line", LINE_CHOICES, this.line, (line) => {
          this.line = line;
          this.context.setQuery({ line: line === LINE_CHOICES[0][0] ? "" : line });
          this.draw();
        }),
        slider,
      ),
      this.error,
      h(
        "div.grid",
        null,
        PLACES.map((side) => h("div", null, this.heads[side], this.places[side])),
      ),
      this.bands,
      this.selection,
      this.throughput,
    );
    this.fillChoices();
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

  /** Draw marks on the curves. @param {Mark[]} marks */
  setMarks(marks) {
    this.marks = marks;
    for (const side of PLACES) this.charts[side]?.chart.setMarks(this.placeMarks());
  }

  placeMarks() {
    return this.marks.flatMap(({ label, at }) => {
      const x = at[/** @type {"time"} */ (this.x)];
      return x === undefined || x === null ? [] : [{ x, label }];
    });
  }

  async fillChoices() {
    try {
      const { signal, server } = this.context;
      const [groups, numbers] = await Promise.all([
        groupChoices(this.store, signal),
        numberChoices(this.store, this.fields, server.sql, signal),
      ]);
      this.numbers = numbers;
      this.drawChoices(groups);
      if (this.answers.left) this.draw(); // its labels are now known
    } catch {
      // Without a list of facts the episodes can still be drawn together.
    }
  }

  /** @param {[string, string][]} groups */
  drawChoices(groups) {
    replace(
      this.groups,
      choice("Group by", groups, this.by, (by) => this.change({ by })),
    );
    for (const side of PLACES) {
      replace(
        this.heads[side],
        choice(`${side === "left" ? "Left" : "Right"} chart`, this.numbers, this.ys[side], (y) => {
          this.ys[side] = y;
          this.context.setQuery({ [side]: y === { left: "return", right: "length" }[side] ? "" : y });
          this.load();
        }),
      );
    }
  }

  /** @param {{by?: string, x?: string}} changes */
  change({ by = this.by, x = this.x }) {
    this.by = by;
    this.x = x;
    this.context.setQuery({
      by: by === "none" ? "" : by,
      x: x === "episode" ? "" : x,
      from: this.range?.[0] ?? "",
      to: this.range?.[1] ?? "",
    });
    this.load();
  }

  /** Ask for the series, and draw them. */
  async load() {
    this.request.abort();
    const request = new AbortController();
    this.request = request;
    const signal = AbortSignal.any([request.signal, this.context.signal]);
    const filter = this.filter.current();
    try {
      const ask = (/** @type {string} */ y) =>
        fetchSeries(
          this.store,
          { y, by: this.by, x: this.x, where: conditionOf(filter), points: pointsOf(this.by, this.episodes) },
          signal,
        );
      const [left, right, throughput, colours] = await Promise.all([
        ask(this.ys.left),
        ask(this.ys.right),
        fetchSeries(this.store, { y: "throughput", x: "time", points: 300 }, signal),
        this.by === "none" ? () => 0 : coloursOf(this.store, this.by),
      ]);
      this.answers = { left, right, throughput };
      this.colours = colours;
      replace(this.error);
      this.draw();
    } catch (/** @type {any} */ error) {
      if (signal.aborted) return;
      if (isHandled(error)) return;
      if (filter.where && error.status >= 400 && error.status < 500) {
        this.filter.showError(error);
        return;
      }
      replace(this.error, errorState(error));
    }
  }

  draw() {
    this.bands.hidden = true;
    for (const side of PLACES) this.drawCurves(side);
    this.throughput.hidden = hasFilter(this.filter.current());
    const rows = this.groupsOf("throughput").map((/** @type {any} */ group) => ({ ...group, label: "rows/s" }));
    if (rows.length) this.drawChart("throughput", "Rows written per second", toLines(rows, this.weight), "time", {});
    else this.drawEmpty("throughput", h("p.soft", null, "Nothing was written yet."));
    this.drawSelection();
  }

  /** @param {"left" | "right"} side */
  drawCurves(side) {
    const y = this.ys[side];
    const label = this.labelOf(side);
    const groups = this.groupsOf(side);
    if (!groups.length) {
      this.drawEmpty(side, this.describeEmpty(y, label));
      return;
    }
    const lines = groups.map((/** @type {any} */ group) =>
      this.by === "none"
        ? { ...group, label: `${label}, ${this.line}` }
        : { ...group, colour: this.colours(group.other ? null : group.name) },
    );
    const data = toLines(lines, this.weight, /** @type {"median"} */ (this.line));
    if (data.series.some(({ low }) => low)) this.bands.hidden = false;
    this.drawChart(side, TITLES[y] ?? label, data, X_LABELS[this.x], {
      height: HEIGHT,
      sync: "episodes",
      onSelect: (/** @type {number} */ at) => this.setRange(around(data.x, at)),
      onRange: (/** @type {number} */ low, /** @type {number} */ high) => this.setRange([low, high]),
    });
    this.charts[side].chart.setRange(...(this.range ?? [null, null]));
    this.charts[side].chart.setMarks(this.placeMarks());
  }

  /** @param {string} place @returns {any[]} The groups of an answer that have values. */
  groupsOf(place) {
    return (this.answers[place]?.groups ?? []).filter((/** @type {any} */ group) => group.x.length);
  }

  /** @param {"left" | "right"} side */
  labelOf(side) {
    return this.numbers.find(([value]) => value === this.ys[side])?.[1] ?? this.ys[side];
  }

  /** @param {string} y @param {string} label */
  describeEmpty(y, label) {
    if (hasFilter(this.filter.current()))
      return emptyState(
        "No ended episode matches.",
        h("button", { type: "button", click: this.filter.clear }, "Remove all filters"),
      );
    if (this.x === "version")
      return emptyState(
        "No episode has a policy version.",
        "Programs give it as the field or the fact ",
        h("code", null, "policy_version"),
        ".",
      );
    if (y !== "return" && y !== "length") return emptyState(`No ended episode has this number: ${label}.`);
    return emptyState(
      "No episode has ended yet.",
      "Curves begin with the first row that is terminated or truncated. This page shows them as they come.",
    );
  }

  /** @param {string} place @param {any} content */
  drawEmpty(place, content) {
    delete this.charts[place];
    replace(this.places[place], content);
  }

  /**
   * @param {string} place
   * @param {string} title
   * @param {{x: number[], series: import("../../chart.js").Series[]}} data
   * @param {string} xLabel
   * @param {Record<string, any>} options
   */
  drawChart(place, title, { x, series }, xLabel, options) {
    const key = JSON.stringify([title, xLabel]);
    if (this.charts[place]?.key === key) {
      this.charts[place].chart.setData(x, series);
      return;
    }
    const isTime = xLabel === "time";
    const { signal } = this.context;
    const chart = lineChart(this.places[place], { title, x, series, isTime, xLabel, height: 130, signal, ...options });
    this.charts[place] = { chart, key };
  }

  /** @param {[number, number] | null} range */
  setRange(range) {
    this.range = range && [Math.round(Math.min(...range)), Math.round(Math.max(...range))];
    this.context.setQuery({ from: this.range?.[0] ?? "", to: this.range?.[1] ?? "" });
    for (const side of PLACES) this.charts[side]?.chart.setRange(...(this.range ?? [null, null]));
    this.drawSelection();
    if (this.range) announce(`${this.describe()} chosen`);
  }

  describe() {
    const [from, to] = /** @type {[number, number]} */ (this.range);
    if (this.x === "time") return `Episodes that ended from ${time(from)} to ${time(to)}`;
    const what = { rows: "Episodes that ended within rows", version: "Episodes of policy versions" }[this.x];
    return `${what ?? "Episodes"} ${integer(from)} to ${integer(to)}`;
  }

  /** The chosen range: a link to its episodes, and what each group did in it. */
  drawSelection() {
    refresh(
      this.selection,
      [this.range, this.x, this.by, this.range && this.answers.left, this.filter.current()],
      () => {
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
        const query = this.queryOf(rangeCondition(this.x, ...this.range, this.hasVersions()));
        const name = this.labelOf("left").toLowerCase();
        const groups = this.by === "none" ? [] : this.inRange(this.range);
        return [
          h(
            "div.row",
            null,
            h("strong", null, this.describe()),
            h("a.button.primary", { href: storeHref(this.store, "/episodes", query) }, "Show these episodes"),
            h("a.button", { href: storeHref(this.store, "/pair", query) }, "Best and worst"),
            h("button", { type: "button", click: () => this.setRange(null) }, "Choose none"),
            this.x === "version" && this.tracker ? h("span", null, "Losses of the run: ", linked(this.tracker)) : null,
          ),
          bounds,
          groups.length
            ? table({
                label: `Groups in this range, the lowest ${name} first`,
                rows: groups,
                columns: [
                  { key: "name", title: "Group", draw: (row) => this.linkOf(row) },
                  { key: "count", title: "Episodes", isNumber: true, draw: (row) => integer(row.count) },
                  { key: "mean", title: `Mean ${name}`, isNumber: true, draw: (row) => number(row.mean) },
                  { key: "min", title: "Lowest", isNumber: true, draw: (row) => number(row.min) },
                  { key: "pair", title: "", draw: (row) => this.pairOf(row) },
                ],
              })
            : null,
        ];
      },
    );
  }

  hasVersions() {
    return this.fields.some((/** @type {any} */ field) => field.name === "policy_version");
  }

  /**
   * The filter of the page with one more condition, for addresses.
   *
   * @param {string | null} where
   */
  queryOf(where) {
    const filter = this.filter.current();
    const both = filter.where && where ? `(${filter.where}\n) AND ${where}` : where || filter.where;
    return writeFilter({ ...filter, where: both, order: filter.order || "return" });
  }

  /** The filter for the episodes of a group in the range. @param {any} row */
  groupQuery(row) {
    const range = rangeCondition(this.x, .../** @type {[number, number]} */ (this.range), this.hasVersions());
    return this.queryOf(`${range} AND ${groupCondition(this.by, row.name)}`);
  }

  /** @param {any} row */
  linkOf(row) {
    if (row.other) return nameOf(row);
    const link = h("a", { href: storeHref(this.store, "/episodes", this.groupQuery(row)) }, shorten(nameOf(row)));
    return [swatch(this.colours(row.name)), " ", link];
  }

  /** @param {any} row */
  pairOf(row) {
    if (row.other) return null;
    return h("a", { href: storeHref(this.store, "/pair", this.groupQuery(row)) }, "best and worst");
  }

  /** Episodes and numbers of each group in a range, the lowest mean first. @param {[number, number]} range */
  inRange([from, to]) {
    const groups = this.answers.left?.groups ?? [];
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

/**
 * Bins for each group, so that a bin has several episodes where there are many.
 *
 * @param {string} by @param {number} episodes
 */
function pointsOf(by, episodes) {
  const [least, each, most] = by === "none" ? [100, 10, 1000] : [50, 20, 500];
  return Math.max(least, Math.min(most, Math.floor(episodes / each)));
}

/**
 * The address of the run in a tracker, such as W&B: `tracker_url` of the store's meta or of its newest session.
 *
 * @param {any} summary
 */
function findTracker({ meta, sessions }) {
  const origins = sessions.flatMap((/** @type {any} */ one) => [one.provenance, one.provenance?.hyperparameters]);
  return [meta, ...origins].find((facts) => facts?.tracker_url)?.tracker_url ?? null;
}
