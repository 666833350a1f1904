// @ts-check
/** Returns, lengths and throughput of up to eight stores on the same axes, and what differs between them. */

import { storeHref } from "../addresses.js";
import { ApiError, getJson, isHandled, storePath } from "../client.js";
import { lineChart } from "../chart.js";
import { choice, debounce, emptyState, h, refresh, replace } from "../dom.js";
import { bytes, cell, compact, integer, number, shorten } from "../format.js";
import { repeat } from "../live.js";
import { fetchSeries, groupChoices, nameOf, readSmoothing, smoothingSlider, toLines, X_CHOICES } from "../series.js";
import { table } from "../table.js";

const MOST_STORES = 8;
/** Most lines of a chart, so that each can be told from the others, and most points of one line. */
const MOST_LINES = 24;
const POINTS = 150;
const PAUSE = 8000;
const META = "meta.";
const CHARTS = /** @type {[string, string][]} */ ([
  ["return", "Return"],
  ["length", "Length in steps"],
  ["throughput", "Rows written per second"],
]);

export function title() {
  return "Compare";
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, { server, query, setQuery, signal }) {
  if (!server.stores.length) {
    replace(
      root,
      h("h1", null, "Compare"),
      emptyState("There are no stores to compare yet.", h("a", { href: "#/" }, "Stores"), " says how to make one."),
    );
    return;
  }
  /** @type {string[]} */
  let chosen = (query.get("stores") ?? "")
    .split(",")
    .filter((name) => server.stores.includes(name))
    .slice(0, MOST_STORES);
  let by = query.get("by") ?? "store";
  let x = X_CHOICES.some(([value]) => value === query.get("x")) ? /** @type {string} */ (query.get("x")) : "rows";
  let weight = readSmoothing(query.get("smooth"));
  let request = new AbortController();
  /** @type {any[]} */
  let found = [];
  /** @type {Record<string, any>} */
  const charts = {};

  const picker = h("fieldset");
  const groups = h("span");
  const slider = smoothingSlider(
    weight,
    (next) => {
      weight = next;
      draw();
    },
    (smooth) => setQuery({ smooth }),
  );
  const places = Object.fromEntries(CHARTS.map(([y]) => [y, h("div")]));
  const empty = h("div");
  const note = h("p.hint");
  const body = h(
    "div.grid",
    null,
    CHARTS.map(([y, text]) =>
      h(
        "section.card",
        { "aria-label": text, class: y === "throughput" ? "card whole" : null },
        h("h2", null, text),
        places[y],
      ),
    ),
  );
  const facts = h("section.card", { "aria-label": "Facts" });
  replace(
    root,
    h("h1", null, "Compare"),
    picker,
    h(
      "div.row.controls",
      null,
      groups,
      choice("Over", X_CHOICES, x, (next) => {
        x = next;
        setQuery({ x: x === "rows" ? "" : x });
        load();
      }),
      slider,
    ),
    empty,
    note,
    body,
    facts,
  );

  const drawPicker = () => {
    const boxes = server.stores.map((name) =>
      h("input", {
        type: "checkbox",
        value: name,
        checked: chosen.includes(name),
        disabled: chosen.length >= MOST_STORES && !chosen.includes(name),
        change: (/** @type {any} */ event) => {
          chosen = event.target.checked ? [...chosen, name] : chosen.filter((each) => each !== name);
          setQuery({ stores: chosen.join(",") });
          for (const box of boxes) box.disabled = chosen.length >= MOST_STORES && !box.checked;
          soon();
        },
      }),
    );
    replace(
      picker,
      h("legend", null, `Stores, up to ${MOST_STORES}`),
      h(
        "div.row.picks",
        { tabindex: "0", role: "group", "aria-label": "Stores to compare" },
        boxes.map((box) => h("label.tick", null, box, box.value)),
      ),
    );
  };

  /** Draw what has been found. */
  const draw = () => {
    const lines = color(found, by);
    empty.hidden = chosen.length > 0;
    body.hidden = facts.hidden = chosen.length === 0;
    replace(empty, emptyState("No store is chosen.", `Tick up to ${MOST_STORES} stores above.`));
    for (const [y, text] of CHARTS) {
      const all = lines
        .flatMap((line) => (line.groups[y] ? [{ ...line.groups[y], label: line.label, colour: line.colour }] : []))
        .filter((group) => group.x.length);
      if (!all.length) {
        delete charts[y];
        replace(
          places[y],
          h(
            "p.soft",
            null,
            y === "throughput" ? "Nothing was written yet." : "None of these stores has an episode that has ended.",
          ),
        );
        continue;
      }
      const isTime = y === "throughput" || x === "time";
      const xLabel = isTime
        ? "since the first row"
        : { episode: "episode", rows: "rows written", version: "policy version" }[x];
      const data = toLines(all.slice(0, MOST_LINES), y === "throughput" ? 0 : weight);
      if (charts[y]?.xLabel === xLabel) charts[y].chart.setData(data.x, data.series);
      else
        charts[y] = {
          xLabel,
          chart: lineChart(places[y], {
            title: text,
            ...data,
            xLabel,
            isDuration: isTime,
            height: y === "throughput" ? 160 : 260,
            signal,
          }),
        };
    }
    const count = lines.length;
    note.hidden = count <= MOST_LINES && !found.some((one) => one.truncated);
    note.textContent = `The charts show the ${MOST_LINES} first of ${count} groups at most, and of each store its 20 largest groups.`;
    refresh(facts, [found.map((one) => [one.name, one.summary, one.error, one.last]), by], () => [
      h("h2", null, "Facts"),
      factTable(found, lines),
    ]);
  };

  const load = async () => {
    request.abort();
    request = new AbortController();
    const both = AbortSignal.any([request.signal, signal]);
    try {
      const answers = await Promise.all(chosen.map((name) => describe(name, by, x, both)));
      if (both.aborted) return;
      found = answers;
      fillChoices();
      draw();
    } catch (error) {
      if (!both.aborted && !isHandled(error)) throw error;
    }
  };
  const soon = debounce(250, load);
  /** @type {Map<string, [string, string][]>} */
  const known = new Map();
  const fillChoices = async () => {
    try {
      await Promise.all(
        chosen
          .filter((name) => !known.has(name))
          .map(async (name) => known.set(name, await groupChoices(name, signal))),
      );
    } catch {
      // Without them the stores can still be compared as they are.
    }
    if (signal.aborted) return;
    const facts = [...new Set(found.flatMap((one) => Object.keys(one.summary?.meta ?? {})))].sort().slice(0, 50);
    const shared = new Map(chosen.flatMap((name) => known.get(name) ?? []).filter(([value]) => value !== "none"));
    const choices = /** @type {[string, string][]} */ ([
      ["store", "Store"],
      ...facts.map((name) => [META + name, `Provenance: ${shorten(name)}`]),
      ...[...shared].map(([value, text]) => [value, `Store and ${text.toLowerCase()}`]),
    ]);
    refresh(groups, choices, () =>
      choice("Tell apart by", choices, by, (next) => {
        by = next;
        setQuery({ by: by === "store" ? "" : by });
        load();
      }),
    );
  };
  drawPicker();
  draw();
  await repeat(
    PAUSE,
    async () => {
      if (chosen.length) await load();
      else await fillChoices();
    },
    signal,
  );
}

/** @param {string} name @param {string} by @param {string} x @param {AbortSignal} signal */
async function describe(name, by, x, signal) {
  const groupBy = by === "store" || by.startsWith(META) ? "none" : by;
  try {
    const ask = (/** @type {any} */ query) => fetchSeries(name, { points: POINTS, ...query }, signal);
    const [summary, returns, lengths, throughput] = await Promise.all([
      getJson(storePath(name, "/summary"), { signal }),
      ask({ y: "return", by: groupBy, x }),
      ask({ y: "length", by: groupBy, x }),
      ask({ y: "throughput", x: "time", points: 100 }),
    ]);
    const begin = Math.min(...throughput.groups.flatMap((group) => group.x));
    const times = (/** @type {any[]} */ all) =>
      all.map((group) => ({ ...group, x: group.x.map((/** @type {number} */ at) => (at - begin) / 1000) }));
    return {
      name,
      groupBy,
      summary,
      truncated: returns.truncated,
      last: lastReturns(returns.groups),
      return: x === "time" ? times(returns.groups) : returns.groups,
      length: x === "time" ? times(lengths.groups) : lengths.groups,
      throughput: times(throughput.groups),
    };
  } catch (error) {
    if (signal.aborted || !(error instanceof ApiError) || isHandled(error)) throw error;
    return { name, groupBy, error: error.message, return: [], length: [], throughput: [] };
  }
}

/** The mean return of the last tenth of the bins, and the highest bin. @param {any[]} groups */
export function lastReturns(groups) {
  const bins = groups
    .flatMap((group) =>
      group.x.map((/** @type {number} */ at, /** @type {number} */ number) => [
        at,
        group.mean[number],
        group.count[number],
      ]),
    )
    .filter((bin) => bin[1] !== null)
    .sort((one, other) => one[0] - other[0]);
  const tail = bins.slice(-Math.max(1, Math.ceil(bins.length / 10)));
  const count = tail.reduce((sum, bin) => sum + bin[2], 0);
  return {
    mean: count ? tail.reduce((sum, bin) => sum + bin[1] * bin[2], 0) / count : null,
    best: bins.length ? Math.max(...bins.map((bin) => bin[1])) : null,
  };
}

/**
 * Lines of the charts: one per store, or one per store and group. A line's colour tells what it differs by.
 *
 * @param {any[]} found @param {string} by
 * @returns {{store: string, label: string, colour: number, groups: Record<string, any>}[]}
 */
function color(found, by) {
  const meta = by.startsWith(META) ? by.slice(META.length) : null;
  const lines = found.flatMap((one) => {
    const fact = meta === null ? null : (one.summary?.meta?.[meta] ?? null);
    if (one.groupBy === "none") {
      return [
        {
          store: one.name,
          key: meta === null ? one.name : JSON.stringify(fact),
          label: meta === null ? one.name : `${shorten(cell(fact ?? "none"), 20)} · ${one.name}`,
          groups: { return: one.return[0], length: one.length[0], throughput: one.throughput[0] },
        },
      ];
    }
    return one.return.map((/** @type {any} */ group, /** @type {number} */ number) => ({
      store: one.name,
      key: JSON.stringify([one.name, group.name, group.other]),
      label: `${one.name} · ${shorten(nameOf(group), 20)}`,
      groups: {
        return: group,
        length: one.length.find((/** @type {any} */ each) => each.name === group.name && each.other === group.other),
        throughput: number === 0 ? one.throughput[0] : undefined,
      },
    }));
  });
  const keys = [...new Set(lines.map((line) => line.key))];
  return lines.map((line) => ({ ...line, colour: keys.indexOf(line.key) }));
}

/** @param {any[]} found @param {{store: string, colour: number}[]} lines */
function factTable(found, lines) {
  const names = [...new Set(found.flatMap((one) => Object.keys(one.summary?.meta ?? {})))].slice(0, 30);
  const swatch = (/** @type {string} */ store) => {
    const line = lines.find((each) => each.store === store);
    const mark = h("span.swatch", { "aria-hidden": "true" });
    mark.style.background = `var(--series-${((line?.colour ?? 0) % 8) + 1})`;
    return mark;
  };
  /** @type {Record<string, any>[]} */
  const rows = found.map((one) => ({
    store: one.name,
    error: one.error,
    rows: one.summary?.rows,
    episodes: one.summary?.episodes.count,
    rate: one.summary?.rates.rows_in,
    bytes: one.summary?.bytes,
    last: one.last?.mean,
    best: one.last?.best,
    ...Object.fromEntries(names.map((name) => [META + name, one.summary?.meta?.[name]])),
  }));
  const differs = (/** @type {string} */ name) => new Set(rows.map((row) => JSON.stringify(row[META + name]))).size > 1;
  return table({
    label: "Facts about the stores",
    rows,
    columns: [
      {
        key: "store",
        title: "Store",
        draw: (row) => [
          swatch(row.store),
          " ",
          h("a", { href: storeHref(row.store) }, row.store),
          row.error ? h("span.bad", null, ` ${shorten(row.error)}`) : null,
        ],
      },
      { key: "last", title: "Return of the last tenth", isNumber: true, draw: (row) => number(row.last) },
      { key: "best", title: "Highest mean", isNumber: true, draw: (row) => number(row.best) },
      { key: "episodes", title: "Episodes", isNumber: true, draw: (row) => integer(row.episodes) },
      { key: "rows", title: "Rows", isNumber: true, draw: (row) => integer(row.rows) },
      { key: "rate", title: "Rows/s", isNumber: true, draw: (row) => compact(row.rate) },
      { key: "bytes", title: "Size", isNumber: true, draw: (row) => bytes(row.bytes) },
      ...names.map((name) => ({
        key: META + name,
        title: shorten(name, 24),
        draw: (/** @type {any} */ row) =>
          differs(name) ? h("strong", null, cell(row[META + name])) : cell(row[META + name]),
      })),
    ],
  });
}
