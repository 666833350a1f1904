// @ts-check
/** The filter of episodes that the pages of a store share: its controls, its counts by value, and copies of it. */

import { announce, choice, errorState, h, replace } from "./dom.js";
import { conditionOf, hasFilter, readFilter, writeFilter } from "./episode_data.js";
import { fetchFacets, numberValues, swatch } from "./facets.js";
import { integer, shorten, time } from "./format.js";
import { drawSaving } from "./selections.js";

import { bar } from "./table.js";

/** @typedef {import("./episode_data.js").Filter} Filter */

/** @type {[string, string][]} */
const STATUSES = [
  ["", "any"],
  ...["open", "terminated", "truncated", "cut"].map((name) => /** @type {[string, string]} */ ([name, name])),
];
/** Choices of the time range: milliseconds before now. @type {[string, string][]} */
const TIMES = [
  ["", "any time"],
  ["600000", "last 10 minutes"],
  ["3600000", "last hour"],
  ["86400000", "last day"],
  ["range", "from … to …"],
];
/** The first facets; facts follow by name. */
const FIRST = ["source", "status", "split"];
/** Facets with more values are not listed. */
const MOST_DISTINCT = 1000;
const NONE = { where: "", source: "", status: "", split: "", since: "", until: "", facts: {} };

/**
 * Draw the filter of a page. Its state is in the address, under the same names on every page.
 *
 * @param {import("./app.js").Context} context
 * @param {object} options
 * @param {() => void} options.onChange Called when the reader has changed the filter.
 * @param {any} [options.more] More controls.
 */
export function createFilter(context, { onChange, more = null }) {
  const { query, setQuery, server, params, signal } = context;
  let filter = readFilter(query);

  const whereError = h("div", { id: "where-error" });
  const where = h("input.mono.grow", {
    id: "where",
    placeholder: '"return" < 10 AND length > 50',
    autocomplete: "off",
    spellcheck: "false",
    maxlength: "4000",
    "aria-describedby": "where-error",
  });
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    change({ where: where.value.trim() });
  };
  const form = h(
    "form.row",
    { role: "search", submit },
    h("label", { for: "where" }, "Where"),
    where,
    h("button.primary", { type: "submit" }, "Filter"),
  );
  const controls = h("div.row");
  const chips = h("div.row");
  const counts = h("div.facets", { "aria-live": "off" });
  const facets = h(
    "details",
    {
      toggle: () => {
        setQuery({ counts: facets.open ? "1" : "" });
        drawCounts();
      },
    },
    h("summary", null, "Counts by value"),
    counts,
  );
  const copies = h("div.column");
  const copying = h("details", { toggle: () => drawCopies() }, h("summary", null, "Copy as SQL or Python"), copies);
  const element = h(
    "div.filters",
    null,
    server.sql
      ? [form, whereError]
      : h("p.soft", null, "This server does not answer SQL, so episodes cannot be sorted or selected by a condition."),
    h("div.row", null, controls, more, chips),
    server.sql ? [facets, copying, server.access === "write" ? drawSaving(context, () => filter) : null] : null,
  );

  /** @param {Partial<Filter>} changes */
  function change(changes) {
    filter = { ...filter, ...changes };
    setQuery({ ...writeFilter(filter), page: "" }, { push: true });
    draw();
    onChange();
  }

  function draw() {
    where.value = filter.where;
    where.removeAttribute("aria-invalid");
    replace(whereError);
    const flagged = h("input", {
      type: "checkbox",
      checked: filter.facts.flag === "true",
      change: () => toggle("info.flag", "true"),
    });
    replace(
      controls,
      choice("Status", STATUSES, filter.status, (status) => change({ status })),
      server.sql ? drawTime() : null,
      server.sql ? h("label.tick", null, flagged, "Flagged only") : null,
    );
    const remove = (/** @type {string} */ text, /** @type {Partial<Filter>} */ changes) =>
      h(
        "button.chip",
        { type: "button", title: text, "aria-label": `Remove the filter ${text}`, click: () => change(changes) },
        h("span", null, text),
        " ×",
      );
    const { flag, ...facts } = filter.facts;
    const others = flag === "true" ? facts : filter.facts;
    replace(
      chips,
      filter.source ? remove(`source: ${filter.source}`, { source: "" }) : null,
      filter.split ? remove(`split: ${filter.split}`, { split: "" }) : null,
      Object.entries(others).map(([name, value]) => {
        const { [name]: _, ...rest } = filter.facts;
        return remove(`${name}: ${value}`, { facts: rest });
      }),
      hasFilter(filter) ? h("button.link", { type: "button", click: clear }, "Remove all filters") : null,
    );
    drawCounts();
    drawCopies();
  }

  /** The range of time in which episodes ended. */
  function drawTime() {
    const isRange = Boolean(filter.since || filter.until);
    const pick = (/** @type {"since" | "until"} */ name, /** @type {string} */ label) => {
      const input = h("input", {
        type: "datetime-local",
        step: 1,
        "aria-label": label,
        value: filter[name] ? time(Number(filter[name])).replace(" ", "T") : "",
        change: () => change({ [name]: input.value ? String(new Date(input.value).getTime()) : "" }),
      });
      return input;
    };
    const inputs = h(
      "span.row",
      { hidden: !isRange },
      pick("since", "Ended from"),
      " to ",
      pick("until", "Ended before"),
    );
    const list = choice("Ended", TIMES, isRange ? "range" : "", (value) => {
      if (value === "range") inputs.hidden = false;
      else change({ since: value && String(Date.now() - Number(value)), until: "" });
    });
    return [list, inputs];
  }

  const clear = () => change(NONE);

  /** Select a value of a facet, or no value of it if it is selected. */
  function toggle(/** @type {string} */ name, /** @type {string} */ value) {
    if (!name.startsWith("info.")) {
      const column = /** @type {"source"} */ (name);
      change({ [column]: filter[column] === value ? "" : value });
      return;
    }
    const { [name.slice(5)]: former, ...rest } = filter.facts;
    change({ facts: former === value ? rest : { ...rest, [name.slice(5)]: value } });
  }

  /** @param {string} name @param {string} value */
  function isSelected(name, value) {
    return (name.startsWith("info.") ? filter.facts[name.slice(5)] : filter[/** @type {"source"} */ (name)]) === value;
  }

  let attempt = new AbortController();
  async function drawCounts() {
    if (!facets.open) return;
    attempt.abort();
    attempt = new AbortController();
    const both = AbortSignal.any([signal, attempt.signal]);
    if (!counts.childElementCount) replace(counts, h("p.loading", null, "Loading…"));
    try {
      const found = await fetchFacets(params.store, { where: conditionOf(filter) }, both);
      const all = conditionOf(filter) ? await fetchFacets(params.store, { values: 100 }, both) : found;
      if (both.aborted) return;
      const rank = (/** @type {string} */ name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
      const shown = found
        .filter(({ name, distinct }) => name !== "split" || distinct > 1 || filter.split)
        .sort((one, other) => rank(one.name) - rank(other.name));
      replace(
        counts,
        shown.map((facet) => drawFacet(facet, all.find(({ name }) => name === facet.name)?.values ?? facet.values)),
        shown.length ? null : h("p.soft", null, "No episode matches, so there is nothing to count."),
      );
    } catch (error) {
      if (!both.aborted) replace(counts, errorState(error));
    }
  }

  /** @param {import("./facets.js").Facet} facet @param {import("./facets.js").Value[]} all Values without the filter. */
  function drawFacet({ name, distinct, values }, all) {
    const title = name.replace(/^info\./, "");
    const colours = numberValues(all);
    const most = Math.max(...values.map(({ count }) => count));
    const isFree = distinct > MOST_DISTINCT || (distinct > 20 && most === 1);
    const value = (/** @type {import("./facets.js").Value} */ { value, count }) =>
      h(
        "button.facet",
        {
          type: "button",
          "aria-pressed": String(isSelected(name, value)),
          title: `${title}: ${value}`,
          click: () => toggle(name, value),
        },
        swatch(colours(value)),
        h("bdi.grow", null, shorten(value, 32) || "empty"),
        bar(count, most),
        h("span.number", null, integer(count)),
      );
    return h(
      "section",
      { "aria-label": `Counts by ${title}` },
      h("h3", null, h("bdi", null, shorten(title, 32))),
      isFree ? h("p.soft", null, `${integer(distinct)} values`) : values.map(value),
      !isFree && distinct > values.length
        ? h("p.soft", null, `${integer(distinct - values.length)} more values`)
        : null,
    );
  }

  function drawCopies() {
    if (!copying.open) return;
    const condition = conditionOf(filter) || "true";
    const order = filter.order || "-episode_id";
    const column = order.replace(/^-/, "");
    const sql = `SELECT * FROM episodes WHERE ${condition}\nORDER BY "${column.replaceAll('"', '""')}"${order.startsWith("-") ? " DESC" : ""}`;
    const python = `rb.episodes(where=${JSON.stringify(condition)})`;
    replace(copies, drawCopy("SQL", sql), drawCopy("Python", python));
  }

  facets.open = query.get("counts") === "1";
  draw();
  return {
    element,
    /** The filter as it is now. */
    current: () => filter,
    change,
    clear,
    toggle,
    /** Show an error of the condition that the reader has typed. */
    showError(/** @type {any} */ error) {
      replace(whereError, errorState(error, true));
      where.setAttribute("aria-invalid", "true");
    },
  };
}

/** @param {string} name @param {string} text */
function drawCopy(name, text) {
  const code = h("textarea.grow.mono", {
    readonly: true,
    rows: "3",
    "aria-label": `The filter as ${name}`,
    value: text,
  });
  const copy = async () => {
    code.select();
    // Pages that are not on this machine need HTTPS for the clipboard; the text is selected in any case.
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    announce(navigator.clipboard ? `Copied as ${name}` : `The ${name} is selected: copy it with Ctrl+C`);
  };
  return h("div.row", null, code, h("button", { type: "button", click: copy }, `Copy as ${name}`));
}
