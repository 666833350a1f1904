// @ts-check
/** Scalars and components of vectors over the steps of an episode, under one cursor. */

import { colourOf, lineChart, thin } from "../../chart.js";
import { errorState, h, replace } from "../../dom.js";
import { integer } from "../../format.js";
import { visible } from "../../live.js";
import { toNumber, withoutNext } from "./fields.js";
import { loadColumns } from "./rows.js";

/** @typedef {import("./fields.js").Field} Field */

/** Steps of one request, of a scalar. */
const STEPS = 20_000;
/** Most points of a chart, over all its lines. */
const MOST_POINTS = 10_000;
/** Charts that are drawn at first. */
const FIRST_CHARTS = 4;
/** Components of a vector that are drawn at first, and most that can be chosen. */
const FIRST_COMPONENTS = 3;
const MOST_COMPONENTS = 32;

/** Chosen components by field; a scalar has the component 0. @typedef {Map<string, number[]>} Choice */

/** @param {Field[]} fields @returns {Field[]} Those that a chart can show. */
export function chartable(fields) {
  const isFlat = (/** @type {Field} */ field) => field.shape.length === 1 && field.kind !== "image";
  return fields.filter((field) => field.dtype !== "arrow" && (field.kind === "scalar" || isFlat(field)));
}

/** @param {Field} field @returns {number[]} Components that are drawn when the reader chooses a field. */
function firstComponents(field) {
  if (field.kind === "scalar") return [0];
  return Array.from({ length: Math.min(field.shape[0], FIRST_COMPONENTS) }, (_, number) => number);
}

/**
 * Read what `plots` in an address chooses, such as "reward,state:0.2". Without it rewards come first, then other
 * scalars, then vectors; flags are drawn only if the reader chooses them.
 *
 * @param {string | null} text
 * @param {Field[]} fields
 * @returns {Choice}
 */
export function readChoice(text, fields) {
  if (text === null) {
    const rank = (/** @type {Field} */ field) =>
      /(^|\.)reward$/.test(field.name) ? 0 : field.kind === "scalar" ? 1 : 2;
    const preferred = withoutNext(fields)
      .filter((field) => field.dtype !== "bool")
      .sort((one, other) => rank(one) - rank(other));
    return new Map(preferred.slice(0, FIRST_CHARTS).map((field) => [field.name, firstComponents(field)]));
  }
  /** @type {Choice} */
  const choice = new Map();
  for (const entry of text.split(",")) {
    const [name, parts] = entry.split(":");
    const field = fields.find((each) => each.name === name);
    if (!field) continue;
    const width = field.shape[0] ?? 1;
    const chosen = parts
      ?.split(".")
      .map(Number)
      .filter((part) => part >= 0 && part < width);
    choice.set(name, chosen ?? firstComponents(field));
  }
  return choice;
}

/** @param {Choice} choice @param {Field[]} fields @returns {string} What `readChoice` reads as this choice. */
export function writeChoice(choice, fields) {
  const scalars = new Set(fields.filter((field) => field.kind === "scalar").map((field) => field.name));
  const entries = [...choice].map(([name, parts]) => (scalars.has(name) ? name : `${name}:${parts.join(".")}`));
  return entries.join(",") || "none";
}

/**
 * @param {import("../../app.js").Context} context
 * @param {object} options
 * @param {number} options.id Of the episode.
 * @param {Field[]} options.fields
 * @param {number} options.first Number of the first step.
 * @param {number} options.count Number of steps from there.
 * @param {(step: number) => void} options.seek Called with the step that the reader clicks.
 */
export function drawCharts({ params, query, setQuery, signal }, options) {
  const fields = chartable(options.fields);
  const choice = readChoice(query.get("plots"), fields);
  const write = () => setQuery({ plots: writeChoice(choice, fields) });
  let { count } = options;
  let cursor = 0;
  /** @type {Map<string, FieldChart>} */
  const charts = new Map();
  const place = h("div.column");

  const draw = () => {
    for (const [name, chart] of charts) {
      if (choice.has(name)) continue;
      chart.remove();
      charts.delete(name);
    }
    for (const field of fields) {
      if (!choice.has(field.name)) continue;
      let chart = charts.get(field.name);
      if (!chart) {
        chart = new FieldChart({ ...options, store: params.store, field, signal, choice, write });
        chart.setCursor(cursor);
        chart.extend(count);
        charts.set(field.name, chart);
      }
      place.append(chart.element); // in the order of the fields
    }
  };
  const tick = (/** @type {Field} */ field) => {
    const change = () => {
      if (box.checked) choice.set(field.name, firstComponents(field));
      else choice.delete(field.name);
      write();
      draw();
    };
    const box = h("input", { type: "checkbox", checked: choice.has(field.name), change });
    return h("label.tick", null, box, field.name);
  };
  const element = h(
    "section.card",
    { "aria-labelledby": "charts-title" },
    h("h2", { id: "charts-title" }, "Over the steps"),
    h("fieldset.row", null, h("legend", null, "Fields"), fields.map(tick)),
    place,
  );
  element.hidden = fields.length === 0;
  draw();
  return {
    element,
    setCursor(/** @type {number} */ step) {
      cursor = step;
      for (const chart of charts.values()) chart.setCursor(step);
    },
    extend(/** @type {number} */ next) {
      count = next;
      for (const chart of charts.values()) chart.extend(count);
    },
  };
}

/** The chart of one field, which loads the field's values step by step. */
class FieldChart {
  /**
   * @param {object} options
   * @param {string} options.store
   * @param {number} options.id
   * @param {Field} options.field
   * @param {number} options.first
   * @param {(step: number) => void} options.seek
   * @param {Choice} options.choice Shared with the other charts.
   * @param {() => void} options.write Write the choice into the address.
   * @param {AbortSignal} options.signal
   */
  constructor(options) {
    this.options = options;
    const { field } = options;
    this.isScalar = field.kind === "scalar";
    this.width = this.isScalar ? 1 : field.shape[0];
    this.names = Array.from({ length: this.width }, (_, part) =>
      this.isScalar ? field.name : `${field.name}[${part}]`,
    );
    /** Values by component, then by step. @type {(number | null)[][]} */
    this.columns = this.names.map(() => []);
    this.end = new AbortController();
    this.signal = AbortSignal.any([this.end.signal, options.signal]);
    /** @type {import("../../chart.js").Chart | null} */
    this.chart = null;
    this.count = 0;
    this.cursor = 0;
    this.isLoading = false;
    this.canvas = h("div");
    this.note = h("p.soft", { role: "status" }, "Loading…");
    this.element = h("div.field-chart", null, this.#heading(), this.#picker(), this.canvas, this.note);
  }

  /** @param {number} step */
  setCursor(step) {
    this.cursor = step;
    this.chart?.setCursor(this.options.first + step);
  }

  /** @param {number} count Load the steps up to this number. */
  extend(count) {
    this.count = count;
    this.#load();
  }

  remove() {
    this.end.abort();
    this.element.remove();
  }

  #heading() {
    const { name, actions } = this.options.field;
    const texts = actions?.slice(0, 12).map((action, at) => `${at} ${action.slice(0, 24)}`);
    return h("h3", null, name, texts ? h("span.soft", null, ` ${texts.join(", ")}`) : null);
  }

  /** Boxes for the components of a vector. */
  #picker() {
    if (this.width === 1) return null;
    const { field, choice, write } = this.options;
    const tick = (/** @type {any} */ _, /** @type {number} */ part) => {
      const change = () => {
        const others = this.#chosen().filter((one) => one !== part);
        choice.set(
          field.name,
          [...others, ...(box.checked ? [part] : [])].sort((one, other) => one - other),
        );
        write();
        this.#draw();
      };
      const box = h("input", { type: "checkbox", checked: this.#chosen().includes(part), change });
      return h("label.tick", null, box, part);
    };
    const boxes = Array.from({ length: Math.min(this.width, MOST_COMPONENTS) }, tick);
    return h("fieldset.row", null, h("legend", null, `Components of ${field.name}`), boxes);
  }

  #chosen() {
    return this.options.choice.get(this.options.field.name) ?? [];
  }

  #draw() {
    const { field, first, id, seek } = this.options;
    const parts = this.#chosen().length ? this.#chosen() : [0];
    const steps = this.columns[0].map((_, at) => first + at);
    const lines = parts.map((part) => this.columns[part]);
    const { x, columns } = thin(steps, lines, Math.floor(MOST_POINTS / lines.length));
    const series = parts.map((part, number) => ({
      label: this.names[part],
      values: columns[number],
      colour: colourOf(this.names[part], this.names),
      steps: field.dtype !== "float32" && field.dtype !== "float64",
    }));
    if (this.chart) this.chart.setData(x, series);
    else {
      this.chart = lineChart(this.canvas, {
        title: `${field.name} over the steps of the episode`,
        x,
        series,
        xLabel: "step",
        height: 150,
        sync: `episode-${id}`,
        signal: this.signal,
        onSelect: (at) => seek(Math.round(at) - first),
      });
    }
    this.chart.setCursor(first + this.cursor);
  }

  async #load() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      for (let start = this.#loaded(); start < this.count && !this.signal.aborted; start = this.#loaded()) {
        await visible(this.signal);
        await this.#loadFrom(start);
        if (this.#loaded() === start) break;
        this.#draw();
        this.note.textContent = `Loading: ${integer(this.#loaded())} of ${integer(this.count)} steps`;
      }
      this.note.textContent = "";
    } catch (error) {
      if (!this.signal.aborted) replace(this.note, errorState(error));
    } finally {
      this.isLoading = false;
    }
  }

  #loaded() {
    return this.columns[0].length;
  }

  /** @param {number} start The first step that is not loaded. */
  async #loadFrom(start) {
    const { store, id, field, first } = this.options;
    const count = Math.min(Math.max(1, Math.floor(STEPS / this.width)), this.count - start);
    const { missing, columns } = await loadColumns(store, id, [field.name], first + start, count, this.signal);
    for (const value of [...Array(missing).fill(null), ...(columns[field.name] ?? [])]) {
      this.columns.forEach((column, part) => column.push(toNumber(this.isScalar ? value : value?.[part])));
    }
  }
}
