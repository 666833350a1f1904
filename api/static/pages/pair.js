// @ts-check
/** Two episodes side by side, moved by one player that aligns them by their steps or by an event. */

import { storeHref } from "../addresses.js";
import { getJson, readJson, request, storePath } from "../client.js";
import { lineChart, paletteColour, thin } from "../chart.js";
import { choice, debounce, emptyState, errorState, h, linked, relativeTime, replace } from "../dom.js";
import { conditionOf, episodesOf, getEpisode, readFilter, writeFilter } from "../episode_data.js";
import { coloursOf, swatch } from "../facets.js";
import { createFilter } from "../filter.js";
import { integer, number } from "../format.js";
import { createPlayer } from "../player.js";
import { table } from "../table.js";
import { chartable } from "./episode/charts.js";
import { elementsOf, plain, toNumber, withoutNext } from "./episode/fields.js";
import { loadColumns, newestOnly, RowCache } from "./episode/rows.js";
import { formatValue } from "./episode/values.js";

/** @typedef {import("../episode_data.js").Episode} Episode */
/** @typedef {import("./episode/fields.js").Field} Field */

/** Steps whose values are looked through for events. */
const MOST_STEPS = 20_000;
/** Larger arrays are neither fetched nor compared, except images. */
const MOST_ELEMENTS = 1024;
/** What two episodes can be aligned by. @type {[string, string][]} */
const SYNC = [
  ["step", "Step"],
  ["end", "End"],
  ["reward", "First reward"],
  ["change", "First change of the field"],
];

/** @param {Record<string, string>} params */
export function title(params) {
  return `Two episodes · ${params.store}`;
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, context) {
  const { params, query, setQuery, signal, server } = context;
  const { store } = params;
  const place = h("div.column");
  const filter = createFilter(context, {
    onChange: () => {
      setQuery({ a: "", b: "" });
      show(null, null);
    },
  });
  /** @param {string | null} a @param {string | null} b Ids; null: the best and the worst episode of the filter. */
  const show = async (a, b) => {
    replace(place, h("p.loading", { role: "status" }, "Loading…"));
    const end = new AbortController();
    current.abort();
    current = end;
    const both = AbortSignal.any([signal, end.signal]);
    try {
      const extremes = a && b ? [] : await findExtremes(store, filter.current(), server.sql, both);
      const pair = await Promise.all(
        [a, b].map((id, number) => (id ? getEpisode(store, Number(id), both) : extremes[number])),
      );
      if (both.aborted) return;
      const missing = [a, b].filter((_, number) => !pair[number]);
      [inputs.a.value, inputs.b.value] = pair.map((episode) => episode?.episode_id ?? "");
      if (missing.length) replace(place, describeMissing(missing.filter(Boolean), filter));
      else await drawPair(place, context, /** @type {Episode[]} */ (pair), [a, b].map(Boolean), both);
    } catch (/** @type {any} */ error) {
      if (both.aborted) return;
      if (filter.current().where && error.status >= 400 && error.status < 500) {
        filter.showError(error);
        replace(place);
      } else replace(place, errorState(error));
    }
  };
  let current = new AbortController();
  const id = (/** @type {string} */ name) =>
    h("input.short", {
      type: "number",
      min: 1,
      required: true,
      value: query.get(name) ?? "",
      "aria-label": `Episode ${name.toUpperCase()}`,
    });
  const inputs = { a: id("a"), b: id("b") };
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    setQuery({ a: inputs.a.value, b: inputs.b.value }, { push: true });
    show(inputs.a.value, inputs.b.value);
  };
  const form = h(
    "form.row",
    { submit },
    h("span", null, "Episodes"),
    inputs.a,
    " and ",
    inputs.b,
    h("button", { type: "submit" }, "Show"),
  );
  replace(root, h("div.heading", null, h("h1", null, "Two episodes"), form), filter.element, place);
  await show(query.get("a"), query.get("b"));
}

/** @param {(string | null)[]} ids @param {ReturnType<typeof createFilter>} filter */
function describeMissing(ids, filter) {
  if (ids.length) return emptyState(`This store has no episode ${ids.join(" and no episode ")}.`);
  return emptyState(
    "No two ended episodes match.",
    "The best and the worst episode of the filter are shown. ",
    h("button", { type: "button", click: filter.clear }, "Remove all filters"),
  );
}

/**
 * The ended episodes with the highest and the lowest return under a filter, or the longest and the shortest.
 *
 * @param {string} store @param {import("../episode_data.js").Filter} filter @param {boolean} sql @param {AbortSignal} signal
 * @returns {Promise<(Episode | null)[]>}
 */
async function findExtremes(store, filter, sql, signal) {
  if (!sql) return [null, null];
  const condition = conditionOf(filter);
  const where = `${condition ? `(${condition}\n) AND ` : ""}status <> 'open' AND live_rows > 0`;
  const ask = async (/** @type {string} */ order) => {
    const response = await request(storePath(store, "/episodes"), { query: { where, order, limit: 1 }, signal });
    return episodesOf(await readJson(response))[0] ?? null;
  };
  let pair = await Promise.all([ask("-return"), ask("return")]);
  if (pair[0]?.return === null) pair = await Promise.all([ask("-length"), ask("length")]);
  return pair[0]?.episode_id === pair[1]?.episode_id ? [null, null] : pair;
}

/**
 * @param {HTMLElement} place @param {import("../app.js").Context} context @param {Episode[]} pair
 * @param {boolean[]} isChosen Whether the reader has named each episode.
 * @param {AbortSignal} signal
 */
async function drawPair(place, context, pair, isChosen, signal) {
  const { params, query, setQuery } = context;
  const { store } = params;
  const gone = pair.find((episode) => episode.live_rows === 0);
  if (gone) {
    replace(place, emptyState(`The rows of episode ${gone.episode_id} have left the store.`));
    return;
  }
  const [summary, colours] = await Promise.all([
    getJson(storePath(store, "/summary"), { signal }),
    coloursOf(store, "source"),
  ]);
  /** @type {Field[]} */
  const fields = withoutNext(summary.fields);
  const images = fields.filter((field) => field.kind === "image");
  const others = fields.filter((field) => field.kind !== "image" && elementsOf(field) <= MOST_ELEMENTS);
  const charted = chartable(others).flatMap((field) =>
    field.kind === "scalar"
      ? [field.name]
      : Array.from({ length: field.shape[0] }, (_, part) => `${field.name}:${part}`),
  );
  const rewards = charted.find((name) => /(^|\.)reward$/.test(name));
  let field = charted.find((name) => name === query.get("field")) ?? rewards ?? charted[0] ?? "";
  let sync = SYNC.find(([value]) => value === query.get("sync"))?.[0] ?? "step";
  const sides = pair.map((episode, number) => {
    const first = episode.length - episode.live_rows;
    const names = others.map(({ name }) => name);
    const player = createPlayer({
      store,
      episode: episode.episode_id,
      fields: images,
      first,
      count: episode.live_rows,
      step: 0,
      speed: 1,
      loop: false,
      controls: "none",
      signal,
      onStep: () => {},
      onRest: () => {},
      onChange: () => {},
    });
    const load = (/** @type {number} */ start, /** @type {number} */ count) =>
      loadColumns(store, episode.episode_id, names, first + start, count, signal);
    const rows = new RowCache({ load, count: () => episode.live_rows });
    return { episode, first, player, rows, letter: "AB"[number], colour: number, shift: 0 };
  });
  const clock = createPlayer({
    store,
    episode: 0,
    fields: [],
    first: 0,
    count: 1,
    step: 0,
    speed: Number(query.get("speed")) || 1,
    loop: query.get("loop") === "1",
    controls: "all",
    signal,
    onStep: (at) => show(at),
    onRest: debounce(300, (at) => setQuery({ step: at })),
    onChange: ({ speed, loop }) =>
      setQuery(speed === undefined ? { loop: loop ? "1" : "" } : { speed: speed === 1 ? "" : speed }),
  });
  const differences = h("div");
  const canvas = h("div");
  const note = h("p.hint", { role: "status" });
  /** @type {import("../chart.js").Chart | null} */
  let chart = null;
  /** What the first common step is called: negative before the event. */
  let start = 0;

  const drawValues = newestOnly(
    async (at) => {
      const found = await Promise.all(
        sides.map(({ rows, shift, episode }) =>
          at - shift >= 0 && at - shift < episode.live_rows ? rows.get(at - shift) : null,
        ),
      );
      return () => replace(differences, differenceTable(others, found));
    },
    (error) => replace(differences, errorState(error)),
  );
  function show(/** @type {number} */ at) {
    for (const { player, shift, episode } of sides) {
      player.show(at - shift);
      player.element.classList.toggle("ended", at < shift || at - shift >= episode.live_rows);
    }
    chart?.setCursor(start + at);
    drawValues(at);
  }

  /** Align the episodes, and draw the field over their common steps. */
  async function align() {
    const values = await Promise.all(sides.map((side) => loadNumbers(store, side, field, signal)));
    const events = await Promise.all(
      sides.map(async (side, number) => {
        if (sync === "end") return side.episode.live_rows - 1;
        if (sync === "change") return values[number].findIndex((value) => value !== values[number][0]);
        if (sync === "reward" && rewards !== undefined)
          return (await loadNumbers(store, side, rewards, signal)).findIndex((value) => value !== 0 && value !== null);
        return 0;
      }),
    );
    if (signal.aborted) return;
    const isMissing = events.some((event) => event < 0) || (sync === "reward" && rewards === undefined);
    const lead = isMissing ? 0 : Math.max(...events);
    sides.forEach((side, number) => {
      side.shift = isMissing ? 0 : lead - events[number];
    });
    const count = Math.max(...sides.map(({ episode, shift }) => episode.live_rows + shift));
    start = sync === "step" ? 0 : -lead;
    clock.setCount(count, start);
    const places = Array.from({ length: count }, (_, at) => at);
    const lines = sides.map(({ shift }, number) => places.map((at) => values[number][at - shift] ?? null));
    const apart = places.find((at) => lines.every((line) => line[at] !== null) && lines[0][at] !== lines[1][at]);
    replace(
      note,
      isMissing ? "An episode has no such event, so both begin together. " : "",
      apart === undefined
        ? "The field is equal wherever both have steps."
        : [
            "The field first differs at ",
            h("button.link", { type: "button", click: () => clock.seek(apart) }, `step ${start + apart}`),
            ".",
          ],
    );
    const drawn = thin(
      places.map((at) => start + at),
      lines,
    );
    const series = sides.map((side, number) => ({
      label: `${side.letter}: episode ${side.episode.episode_id}`,
      values: drawn.columns[number],
      colour: () => paletteColour(side.colour),
    }));
    const name = `${field} of both episodes`;
    if (!field) replace(canvas, h("p.soft", null, "No field has a number for each step."));
    else
      chart = lineChart(canvas, {
        title: name,
        x: drawn.x,
        series,
        xLabel: sync === "step" ? "step" : "steps from the event",
        height: 170,
        signal,
        onSelect: (at) => clock.seek(Math.round(at) - start),
      });
    show(clock.step());
  }

  const sideCard = (/** @type {typeof sides[0]} */ { episode, player, letter, colour }, /** @type {number} */ number) =>
    h(
      "section.card",
      { "aria-label": `Episode ${letter}` },
      h(
        "h2",
        null,
        swatch(colour),
        ` ${letter}: `,
        h("a", { href: storeHref(store, `/episodes/${episode.episode_id}`) }, `episode ${episode.episode_id}`),
        isChosen[number] ? "" : number === 0 ? ", the best" : ", the worst",
      ),
      player.element,
    );
  const controls = h("div.row");
  const drawControls = () =>
    replace(
      controls,
      choice("Align by", SYNC, sync, (value) => {
        sync = value;
        setQuery({ sync: value === "step" ? "" : value });
        align().catch(fail);
      }),
      charted.length
        ? choice(
            "Field",
            charted.map((name) => [name, name]),
            field,
            (value) => {
              field = value;
              setQuery({ field: value });
              align().catch(fail);
            },
          )
        : null,
    );
  const fail = (/** @type {any} */ error) => {
    if (!signal.aborted) replace(note, errorState(error));
  };
  drawControls();
  replace(
    place,
    h("div.card", null, clock.element, controls, note, canvas),
    h("div.sides", null, sides.map(sideCard)),
    h("section.card", { "aria-label": "Values" }, h("h2", null, "Values at this step"), differences),
    h("section.card", { "aria-label": "Facts" }, h("h2", null, "Facts"), factTable(pair, colours)),
  );
  await align();
  const asked = Number(query.get("step"));
  if (asked > 0) clock.show(asked);
}

/**
 * The numbers of a field over the steps of an episode.
 *
 * @param {string} store @param {{episode: Episode, first: number}} side @param {string} name
 * @param {AbortSignal} signal
 * @returns {Promise<(number | null)[]>}
 */
async function loadNumbers(store, { episode, first }, name, signal) {
  if (!name) return [];
  const [field, part] = name.split(/:(?=\d+$)/);
  const count = Math.min(episode.live_rows, MOST_STEPS);
  const { missing, columns } = await loadColumns(store, episode.episode_id, [field], first, count, signal);
  const values = columns[field].map((value) => toNumber(part === undefined ? value : value?.[Number(part)]));
  return [...Array(missing).fill(null), ...values];
}

/**
 * The values of both episodes; what differs is marked.
 *
 * @param {Field[]} fields @param {(Record<string, any> | null)[]} rows
 */
function differenceTable(fields, [a, b]) {
  const rows = fields.map((field) => {
    const [one, other] = [a, b].map((row) => row?.[field.name]);
    return { field, one, other, text: a && b ? difference(one, other, Boolean(field.actions)) : "" };
  });
  const value = (/** @type {any} */ found, /** @type {any} */ row, /** @type {Field} */ field) =>
    row === null ? h("span.soft", null, "no step") : h("span.mono", null, formatValue(found, field));
  return table({
    label: "Values of both episodes",
    rows,
    columns: [
      { key: "name", title: "Field", draw: (row) => row.field.name },
      { key: "a", title: "A", draw: (row) => value(row.one, a, row.field) },
      { key: "b", title: "B", draw: (row) => value(row.other, b, row.field) },
      {
        key: "text",
        title: "Difference",
        draw: (row) => (row.text ? h("mark", null, row.text) : a && b ? h("span.soft", null, "none") : ""),
      },
    ],
  });
}

/**
 * How two values differ, in words; "": they are equal.
 *
 * @param {any} one @param {any} other
 * @param {boolean} [isName] Whether numbers are names, so that their difference means nothing.
 */
export function difference(one, other, isName = false) {
  const [a, b] = [plain(one), plain(other)];
  if (JSON.stringify(a) === JSON.stringify(b)) return "";
  if (typeof a === "number" && typeof b === "number" && !isName) return `${b > a ? "+" : ""}${number(b - a)}`;
  if (!Array.isArray(a) || !Array.isArray(b)) return "differs";
  const [left, right] = [a.flat(Infinity), b.flat(Infinity)];
  if (left.length !== right.length) return `${integer(left.length)} and ${integer(right.length)} values`;
  const count = left.filter((value, at) => value !== right[at]).length;
  return `${integer(count)} of ${integer(left.length)} values`;
}

/** @param {Episode[]} pair @param {import("../facets.js").Colours} colours */
function factTable(pair, colours) {
  const names = [...new Set(pair.flatMap(({ info }) => Object.keys(info)))]
    .filter((name) => name !== "measures")
    .sort();
  /** @type {[string, (episode: Episode) => any, ((episode: Episode) => any)?][]} */
  const lines = [
    ["Return", (episode) => number(episode.return)],
    ["Length", (episode) => integer(episode.length)],
    ["Status", (episode) => episode.status],
    ["Source", (episode) => episode.source, ({ source }) => [swatch(colours(source)), " ", h("bdi", null, source)]],
    ["Split", (episode) => episode.split],
    ["Ended", () => "", ({ end_time }) => relativeTime(end_time)],
    ...names.map(
      (name) =>
        /** @type {[string, (episode: Episode) => any, (episode: Episode) => any]} */ ([
          name,
          ({ info }) => JSON.stringify(info[name]),
          ({ info }) => (info[name] === undefined ? h("span.soft", null, "not recorded") : linked(info[name])),
        ]),
    ),
  ];
  const rows = lines.map(([name, read, draw = read]) => ({
    name,
    isEqual: read(pair[0]) === read(pair[1]),
    a: draw(pair[0]),
    b: draw(pair[1]),
  }));
  const side = (/** @type {"a" | "b"} */ name) => (/** @type {any} */ row) =>
    row.isEqual ? row[name] : h("mark", null, row[name]);
  return table({
    label: "Facts of both episodes",
    rows,
    columns: [
      { key: "name", title: "Fact", draw: (row) => h("bdi", null, row.name) },
      { key: "a", title: "A", draw: side("a") },
      { key: "b", title: "B", draw: side("b") },
    ],
  });
}
