// @ts-check
/** One episode: its frames, values, texts and facts. */

import { storeHref } from "../app.js";
import { getJson, isLongInteger, readJson, request, storePath } from "../client.js";
import { colourOf, lineChart, thin } from "../chart.js";
import { announce, debounce, emptyState, errorState, h, replace } from "../dom.js";
import {
  changeFacts, FILTER, formatFact, getEpisode, hasFilter, neighbourOf, parseFact, readFilter, writeFilter,
} from "../episode_data.js";
import { integer, number, time } from "../format.js";
import { visible, watch } from "../live.js";
import { createPlayer } from "../player.js";
import { facts as factList } from "../table.js";

/** Steps of one request for charts. */
const CHART_STEPS = 20_000;
/** Steps of one request for values and texts. */
const ROW_STEPS = 64;
/** Windows of rows that are kept. */
const ROW_WINDOWS = 8;
/** Most points of a plot, over all its lines. */
const MOST_POINTS = 10_000;
/** Charts that are drawn at first. */
const FIRST_PLOTS = 4;
/** Components of a vector that are drawn at first, and most that can be chosen. */
const FIRST_COMPONENTS = 3;
const MOST_COMPONENTS = 32;
/** Tokens that are drawn before the reader asks for all. */
const MOST_TOKENS = 2000;
/** Values of a vector that are written out. */
const MOST_VALUES = 16;
/** Larger arrays are neither fetched nor drawn, except images. */
const MOST_ELEMENTS = 1024;

/** @param {Record<string, string>} params */
export function title(params) {
  return `Episode ${params.episode} · ${params.store}`;
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, context) {
  const { params, query, signal } = context;
  const { store } = params;
  const id = Number(params.episode);
  const filter = readFilter(query);
  const list = storeHref(store, "/episodes", writeFilter(filter));
  const [summary, episode] = await Promise.all([
    getJson(storePath(store, "/summary"), { signal }), getEpisode(store, id, signal),
  ]);
  if (episode === null) {
    replace(root, h("h1", null, `Episode ${id}`), emptyState(`Store ${store} has no episode ${id}.`, h("a", { href: list }, "All episodes")));
    return;
  }
  const header = h("div");
  const about = h("div.card");
  replace(root, header, about);
  const drawAbout = () => replace(about, factList(describe(episode, store)));
  drawAbout();
  drawHeader(header, context, episode, filter, list);

  // Steps are counted from the first one that is in the store now. Steps that leave it later keep their numbers.
  const first = episode.length - episode.live_rows;
  const count = () => episode.length - first;
  const factForm = drawFacts(context, episode);
  if (episode.live_rows === 0) {
    root.append(emptyState("The rows of this episode have left the store.",
      "Its facts stay. To keep the rows of such episodes, give the store a larger capacity."), factForm);
    return;
  }
  const asked = Number(query.get("step") ?? first);
  const images = summary.fields.filter((/** @type {any} */ field) => field.kind === "image");
  const others = summary.fields.filter((/** @type {any} */ field) => field.kind !== "image" && elementsOf(field) <= MOST_ELEMENTS);
  const chosen = (query.get("images") ?? "").split(",").filter(Boolean);
  const selected = () => images.filter((/** @type {any} */ field) => chosen.length === 0 || chosen.includes(field.name));

  const rows = new RowCache({ store, id, first, count, fields: others, signal });
  const values = drawValues(rows, others, first);
  const texts = drawTexts(rows, others, context);
  const note = debounce(300, (/** @type {number} */ step) => context.setQuery({ step: first + step }));
  const player = createPlayer({
    store, episode: id, fields: selected(), first, count: count(),
    step: Number.isFinite(asked) ? asked - first : 0,
    speed: Number(query.get("speed")) || 1, loop: query.get("loop") === "1", signal,
    onStep: (step) => { charts.setCursor(step); values.show(step); texts.show(step); },
    onRest: note,
    onChange: ({ speed, loop }) => context.setQuery({
      ...(speed === undefined ? {} : { speed: speed === 1 ? "" : speed }), ...(loop === undefined ? {} : { loop: loop ? "1" : "" }),
    }),
  });
  const charts = drawCharts(context, id, others, first, count(), (step) => player.seek(step));
  const picker = images.length < 2 ? null : h("fieldset.row", null, h("legend", null, "Images"), images.map((/** @type {any} */ field) => {
    const box = h("input", {
      type: "checkbox", checked: selected().includes(field),
      change: () => {
        const names = new Set(selected().map((/** @type {any} */ each) => each.name));
        if (box.checked) names.add(field.name);
        else names.delete(field.name);
        chosen.splice(0, chosen.length, ...names);
        if (names.size === 0) chosen.push("none");
        context.setQuery({ images: names.size === images.length ? "" : chosen.join(",") });
        player.setFields(selected());
      },
    });
    return h("label.tick", null, box, field.name);
  }));
  if (picker) player.element.append(picker);
  root.append(h("div.episode", null,
    h("div.column", null, player.element, texts.element, charts.element),
    h("div.column.side", null, values.element, factForm)));
  values.show(player.step());
  texts.show(player.step());
  charts.setCursor(player.step());

  if (episode.status === "open") {
    watch(store, async () => {
      const now = await getEpisode(store, id, signal);
      if (now === null || signal.aborted) return;
      const grown = now.length !== episode.length;
      const changed = now.status !== episode.status || now.live_rows !== episode.live_rows;
      Object.assign(episode, { ...now, info: episode.info });
      if (grown || changed) drawAbout();
      if (grown) {
        rows.forgetEnd();
        player.setCount(count());
        charts.extend(count());
      }
    }, signal);
  }
}

/** @param {any} field Number of values of a row. */
function elementsOf(field) {
  return field.shape.reduce((/** @type {number} */ product, /** @type {number} */ side) => product * side, 1);
}

/** @param {import("../episode_data.js").Episode} episode @param {string} store @returns {[string, any][]} */
function describe(episode, store) {
  return [
    ["Status", h(`span.badge.${episode.status}`, null, episode.status)],
    ["Return", number(episode.return)], ["Length", integer(episode.length)],
    ["Source", h("a", { href: storeHref(store, "/episodes", { source: episode.source }) }, episode.source)],
    ["Started", time(episode.start_time)], ["Ended", episode.status === "open" ? "still open" : time(episode.end_time)],
    ...(episode.live_rows === episode.length ? [] : [/** @type {[string, any]} */ (["Steps in the store", `the last ${integer(episode.live_rows)}`])]),
    ...(episode.trajectory_id === null ? [] : [/** @type {[string, any]} */ (["Trajectory id", episode.trajectory_id])]),
  ];
}

/** Title, and links to the episodes before and after under the filter. */
async function drawHeader(/** @type {HTMLElement} */ header, /** @type {import("../app.js").Context} */ { params, query, server, signal },
  /** @type {any} */ episode, /** @type {import("../episode_data.js").Filter} */ filter, /** @type {string} */ list) {
  const { store } = params;
  const keep = Object.fromEntries([...FILTER, "speed", "loop", "images", "plots", "colour"].map((name) => [name, query.get(name)]));
  const links = h("nav.row", { "aria-label": "Episodes" });
  replace(header, h("div.heading", null, h("h1", null, `Episode ${episode.episode_id}`), links));
  const draw = (/** @type {(number | null)[]} */ [previous, next]) => {
    const link = (/** @type {number | null} */ id, /** @type {string} */ text, /** @type {string} */ rel) => (id === null
      ? h("span.soft", null, text) : h("a.button", { href: storeHref(store, `/episodes/${id}`, keep), rel }, text));
    replace(links, link(previous, "← Previous", "prev"), link(next, "Next →", "next"),
      h("a", { href: list }, hasFilter(filter) ? "Episodes of this filter" : "All episodes"));
  };
  draw([null, null]);
  try {
    draw(await Promise.all([neighbourOf(store, episode, filter, -1, server.sql, signal), neighbourOf(store, episode, filter, 1, server.sql, signal)]));
  } catch (error) {
    if (!signal.aborted) links.append(errorState(error));
  }
}

// -- facts ---------------------------------------------------------------------------------------------------------

/** Facts about the episode; with write access a form. */
function drawFacts(/** @type {import("../app.js").Context} */ { params, server, signal }, /** @type {any} */ episode) {
  const body = h("div.column");
  const place = h("div", { role: "status" });
  const element = h("section.card", { "aria-labelledby": "facts-title" }, h("h2", { id: "facts-title" }, "Facts"), body, place);
  const change = async (/** @type {Record<string, any>} */ changes, /** @type {string} */ done) => {
    replace(place);
    try {
      episode.info = await changeFacts(params.store, episode.episode_id, changes, signal);
      announce(done);
      draw();
    } catch (error) {
      if (!signal.aborted) replace(place, errorState(error));
    }
  };
  const draw = () => {
    const entries = Object.entries(episode.info);
    if (server.access !== "write") {
      replace(body, entries.length
        ? h("dl.pairs", null, entries.map(([name, value]) => [h("dt", null, name), h("dd", null, formatFact(value))]))
        : h("p.soft", null, "Nothing was noted about this episode. A server that takes writes can add facts here; programs do it with rb.episodes.annotate."));
      return;
    }
    const focused = body.contains(document.activeElement) ? document.activeElement?.id : null;
    const flag = h("input", { type: "checkbox", id: "fact-flag", checked: episode.info.flag === true, change: () => change({ flag: flag.checked || null }, flag.checked ? "Flag set" : "Flag removed") });
    const note = h("textarea", { id: "fact-note", rows: "2", placeholder: "What is notable about this episode", value: formatNote(episode.info.note),
      change: () => change({ note: note.value.trim() || null }, "Note saved") });
    const name = h("input", { id: "fact-name", required: true, maxlength: "200", autocomplete: "off" });
    const value = h("input", { id: "fact-value", required: true, autocomplete: "off", "aria-describedby": "fact-hint" });
    replace(body,
      h("label.tick", null, flag, "Flagged"), h("label.field", null, "Note", note),
      entries.filter(([key]) => key !== "flag" && key !== "note").map(([key, fact], place) => {
        const input = h("input.grow", { id: `fact-${place}`, value: formatFact(fact), autocomplete: "off", change: () => change({ [key]: parseFact(input.value) }, `${key} saved`) });
        return h("div.fact", null, h("label", { for: `fact-${place}`, title: key }, key),
          h("div.row", null, input, h("button", { type: "button", "aria-label": `Remove ${key}`, title: "Remove", click: () => change({ [key]: null }, `${key} removed`) }, "×")));
      }),
      h("form.row.fact-new", { submit: (/** @type {Event} */ event) => { event.preventDefault(); change({ [name.value]: parseFact(value.value) }, `${name.value} added`); } },
        h("label.field", null, "New fact", name), h("label.field.grow", null, "Value", value), h("button", { type: "submit" }, "Add")),
      h("p.hint", { id: "fact-hint" }, "Values are JSON (12, true, [1, 2]) or text. A change is saved when you leave its field."));
    if (focused) document.getElementById(focused)?.focus();
  };
  draw();
  return element;
}

/** @param {any} value */
function formatNote(value) {
  return value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value);
}

// -- rows ----------------------------------------------------------------------------------------------------------

/** Rows of the fields that are not images, fetched in windows around the step that is shown. */
class RowCache {
  /** @param {{store: string, id: number, first: number, count: () => number, fields: any[], signal: AbortSignal}} options */
  constructor(options) {
    this.options = options;
    this.size = ROW_STEPS;
    /** @type {Map<number, Promise<Columns>>} */
    this.windows = new Map();
  }

  /** @param {number} step @returns {Promise<Record<string, any> | null>} The row's values by field; null: it has left the store. */
  async get(step) {
    const size = this.size;
    const start = Math.floor(step / size) * size;
    let found = this.windows.get(start);
    if (!found) {
      found = this.#load(start, Math.min(size, this.options.count() - start));
      this.windows.set(start, found);
      const oldest = this.windows.keys().next().value;
      if (this.windows.size > ROW_WINDOWS && oldest !== undefined) this.windows.delete(oldest);
    }
    try {
      const { missing, columns } = await found;
      const at = step - start - missing;
      return at < 0 ? null : Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column[at]]));
    } catch (error) {
      this.windows.delete(start);
      // Large texts: fewer rows fit into an answer.
      if (error?.status !== 413 || size === 1) throw error;
      if (this.size === size) {
        this.size = Math.max(1, size >> 2);
        this.windows.clear();
      }
      return this.get(step);
    }
  }

  forgetEnd() {
    this.windows.clear();
  }

  /** @param {number} start @param {number} count */
  async #load(start, count) {
    const { store, id, first, fields, signal } = this.options;
    return loadColumns(store, id, fields.map((field) => field.name), first + start, count, signal);
  }
}

/** @typedef {{missing: number, columns: Record<string, any[]>}} Columns Values by field, and how many steps before them have left the store. */

/**
 * @param {string} store
 * @param {number} id
 * @param {string[]} names
 * @param {number} start
 * @param {number} count
 * @param {AbortSignal} signal
 * @returns {Promise<Columns>}
 */
async function loadColumns(store, id, names, start, count, signal) {
  if (names.length === 0) return { missing: 0, columns: {} };
  const response = await request(storePath(store, `/episodes/${id}`), { query: { fields: names.join(","), start, count }, signal });
  const first = Number(response.headers.get("X-First-Step") ?? start + count);
  return { missing: first - start, columns: (await readJson(response)).rows };
}

/** @param {any} value A value of shape [] or [1] as a number or text. */
function plain(value) {
  return Array.isArray(value) && value.length === 1 && !Array.isArray(value[0]) ? value[0] : value;
}

/** @param {any} value */
function toNumber(value) {
  const found = plain(value);
  return typeof found === "boolean" || isLongInteger(found) ? Number(found) : typeof found === "number" ? found : null;
}

/** Values of the step that is shown. */
function drawValues(/** @type {RowCache} */ rows, /** @type {any[]} */ fields, /** @type {number} */ first) {
  const hasTokens = fields.some((field) => field.kind === "tokens" || isPieces(field));
  const small = fields.filter((field) => field.kind !== "text" && field.kind !== "tokens" && !isPieces(field) && !(hasTokens && isPerToken(field)));
  const cells = new Map(small.map((field) => [field.name, h("dd.mono")]));
  const heading = h("h2", { id: "values-title" }, "Values");
  const element = h("section.card", { "aria-labelledby": "values-title" }, heading,
    h("dl.pairs", null, small.map((field) => [h("dt", { title: field.type }, field.name), cells.get(field.name)])));
  element.hidden = small.length === 0;
  const show = latest(async (/** @type {number} */ step) => {
    heading.textContent = `Values at step ${first + step}`;
    const row = await rows.get(step);
    return () => {
      if (row === null) heading.textContent = `Step ${first + step} has left the store`;
      for (const field of small) /** @type {HTMLElement} */ (cells.get(field.name)).textContent = row === null ? "" : formatValue(row[field.name], field);
    };
  }, (error) => { heading.textContent = error.message; });
  return { element, show };
}

/** @param {any} value @param {any} field */
function formatValue(value, field) {
  const found = plain(value);
  if (field.actions && Number.isInteger(found)) return nameOf(field.actions, found);
  if (typeof found === "boolean") return found ? "true" : "false";
  if (Array.isArray(found)) {
    const flat = found.flat(Infinity);
    const texts = flat.slice(0, MOST_VALUES).map((one) => (typeof one === "number" ? number(one) : formatFact(one)));
    return `[${texts.join(", ")}${flat.length > MOST_VALUES ? `, … ${flat.length} in all` : ""}]`;
  }
  if (found && typeof found === "object") return JSON.stringify(found);
  return found === null || found === undefined ? "none" : number(found);
}

/** @param {string[]} names @param {number} action */
function nameOf(names, action) {
  const name = names[action];
  return name === undefined ? String(action) : `${name} (${action})`;
}

/**
 * Run one call at a time; of those that come meanwhile only the newest follows.
 *
 * @param {(step: number) => Promise<() => void>} load Returns what to do with what was loaded.
 * @param {(error: any) => void} fail
 */
function latest(load, fail) {
  let running = false;
  /** @type {number | null} */
  let next = null;
  const run = async (/** @type {number} */ step) => {
    // One request at a time: during playback the steps in between are left out.
    if (running) {
      next = step;
      return;
    }
    running = true;
    try {
      (await load(step))();
    } catch (error) {
      if (error?.name !== "AbortError") fail(error);
    }
    running = false;
    if (next !== null) {
      const again = next;
      next = null;
      run(again);
    }
  };
  return run;
}

// -- texts and tokens ----------------------------------------------------------------------------------------------

/** @param {any} field Whether it may have a number for each token. */
function isPerToken(field) {
  return field.dtype === "arrow" && /^(float|double|u?int|bool)[a-z0-9]*\[\?\]$|list<(float|double|halffloat|u?int|bool)[a-z0-9]*>/.test(field.type);
}

/** @param {any} field Whether its values are lists of the texts of tokens. */
function isPieces(field) {
  return field.dtype === "arrow" && /^(large_)?list<(large_)?string>$/.test(field.type);
}

/** Texts and tokens of the step that is shown. */
function drawTexts(/** @type {RowCache} */ rows, /** @type {any[]} */ fields, /** @type {import("../app.js").Context} */ { query, setQuery }) {
  const texts = fields.filter((field) => field.kind === "text");
  const tokens = fields.filter((field) => field.kind === "tokens");
  const pieces = fields.filter(isPieces);
  const scores = fields.filter((field) => isPerToken(field) && field.kind !== "tokens");
  const colours = h("select", { id: "colour", change: () => { setQuery({ colour: colours.value }); show(current); } },
    h("option", { value: "" }, "nothing"), scores.map((field) => h("option", { value: field.name, selected: field.name === query.get("colour") }, field.name)));
  if (!query.has("colour") && scores.length) colours.value = scores[0].name;
  const body = h("div.column");
  const hasTokens = tokens.length + pieces.length > 0;
  const element = h("section.card", { "aria-labelledby": "texts-title" },
    h("div.heading", null, h("h2", { id: "texts-title" }, hasTokens ? "Texts and tokens" : "Texts"),
      hasTokens && scores.length ? h("label.row", null, "Colour tokens by", colours) : null), body);
  element.hidden = texts.length + tokens.length + pieces.length === 0;
  let current = 0;
  const show = latest(async (/** @type {number} */ step) => {
    current = step;
    if (element.hidden) return () => {};
    const row = await rows.get(step);
    return () => row === null ? replace(body, h("p.soft", null, "This step has left the store.")) : replace(body,
      texts.map((field) => h("section.text", null, h("h3", null, field.name), textOf(row[field.name]))),
      [...pieces, ...tokens].map((field) => h("section.text", null, h("h3", null, field.name),
        tokenList(row[field.name], scores.find((each) => each.name === colours.value), row))));
  }, (error) => replace(body, errorState(error)));
  return { element, show };
}

/** @param {any} value */
function textOf(value) {
  if (value === null || value === undefined) return h("p.soft", null, "none");
  if (value === "") return h("p.soft", null, "empty");
  return h("p.prose", { dir: "auto" }, String(value));
}

/** @param {any} values @param {any} score @param {Record<string, any>} row */
function tokenList(values, score, row) {
  if (!Array.isArray(values)) return h("p.soft", null, "none");
  if (values.length === 0) return h("p.soft", null, "no tokens");
  const found = score ? row[score.name] : null;
  const numbers = Array.isArray(found) && found.length === values.length ? found.map(toNumber) : null;
  const finite = (numbers ?? []).filter((value) => value !== null);
  const low = finite.reduce((least, value) => Math.min(least, value), Infinity);
  const high = finite.reduce((most, value) => Math.max(most, value), -Infinity);
  const place = h("p.tokens", { dir: "auto" });
  const add = (/** @type {number} */ from, /** @type {number} */ to) => {
    for (let at = from; at < to; at += 1) place.append(token(at));
  };
  const token = (/** @type {number} */ at) => {
    const value = numbers?.[at] ?? null;
    const text = typeof values[at] === "string" ? values[at] : String(values[at]);
    const span = h(typeof values[at] === "string" ? "span.token.piece" : "span.token", { title: `token ${at}: ${text.slice(0, 80)}${value === null ? "" : `, ${score.name} ${number(value)}`}` }, text);
    if (value !== null) span.style.backgroundColor = shade(value, low, high);
    return span;
  };
  add(0, Math.min(values.length, MOST_TOKENS));
  const more = values.length <= MOST_TOKENS ? null : h("button", { type: "button", click: () => { add(MOST_TOKENS, values.length); more.remove(); } }, `Show all ${integer(values.length)} tokens`);
  const legend = !score ? null : numbers
    ? h("p.legend", null, `${score.name}: `, swatch(low, low, high), number(low), " to ", swatch(high, low, high), number(high))
    : h("p.soft", null, `${score.name} has no value for each of these tokens.`);
  return [place, more, legend];
}

/** @param {number} value @param {number} low @param {number} high */
function swatch(value, low, high) {
  const span = h("span.swatch", { "aria-hidden": "true" });
  span.style.backgroundColor = shade(value, low, high);
  return span;
}

/** A colour for a value: two hues where there are both signs, otherwise one that grows from the smallest value on. */
function shade(/** @type {number} */ value, /** @type {number} */ low, /** @type {number} */ high) {
  const both = low < 0 && high > 0;
  const part = both ? Math.abs(value) / Math.max(-low, high) : high > low ? (value - low) / (high - low) : 1;
  const inverse = !both && high <= 0;  // of log-probabilities the unlikely tokens stand out
  const share = Math.round((inverse ? 1 - part : part) * 48);
  return `color-mix(in srgb, var(${(both && value < 0) || inverse ? "--series-2" : "--series-1"}) ${share}%, transparent)`;
}

// -- charts --------------------------------------------------------------------------------------------------------

/** Scalars and components of vectors over the steps, under one cursor. */
function drawCharts(/** @type {import("../app.js").Context} */ { params, query, setQuery, signal }, /** @type {number} */ id,
  /** @type {any[]} */ fields, /** @type {number} */ first, /** @type {number} */ length, /** @type {(step: number) => void} */ seek) {
  const usable = fields.filter((field) => field.dtype !== "arrow" && (field.kind === "scalar" || (field.shape.length === 1 && field.kind !== "image")));
  const isFlag = (/** @type {any} */ field) => field.dtype === "bool";
  const rank = (/** @type {any} */ field) => (/(^|\.)reward$/.test(field.name) ? 0 : isFlag(field) ? 3 : field.kind === "scalar" ? 1 : 2);
  const preferred = [...usable].sort((a, b) => rank(a) - rank(b)).filter((field) => !isFlag(field)).slice(0, FIRST_PLOTS);
  /** Chosen components by field. @type {Map<string, number[]>} */
  const chosen = new Map();
  const componentsOf = (/** @type {any} */ field) => (field.kind === "scalar" ? [0]
    : Array.from({ length: Math.min(field.shape[0], FIRST_COMPONENTS) }, (_, number) => number));
  if (query.has("plots")) {
    for (const entry of /** @type {string} */ (query.get("plots")).split(",")) {
      const [name, parts] = entry.split(":");
      const field = usable.find((each) => each.name === name);
      if (field) chosen.set(name, parts ? parts.split(".").map(Number).filter((part) => part >= 0 && part < (field.shape[0] ?? 1)) : componentsOf(field));
    }
  } else {
    for (const field of preferred) chosen.set(field.name, componentsOf(field));
  }
  const write = () => setQuery({
    plots: [...chosen].map(([name, parts]) => {
      const field = usable.find((each) => each.name === name);
      return field.kind === "scalar" ? name : `${name}:${parts.join(".")}`;
    }).join(",") || "none",
  });
  const place = h("div.column");
  const element = h("section.card", { "aria-labelledby": "charts-title" }, h("h2", { id: "charts-title" }, "Over the steps"),
    h("fieldset.row", null, h("legend", null, "Fields"), usable.map((field) => {
      const box = h("input", { type: "checkbox", checked: chosen.has(field.name), change: () => {
        if (box.checked) chosen.set(field.name, componentsOf(field));
        else chosen.delete(field.name);
        write();
        draw();
      } });
      return h("label.tick", null, box, field.name);
    })), place);
  element.hidden = usable.length === 0;
  let count = length;
  let cursor = 0;
  /** @type {Map<string, {end: AbortController, box: HTMLElement, setCursor: (step: number) => void, extend: () => void}>} */
  const drawn = new Map();

  const draw = () => {
    for (const [name, chart] of drawn) {
      if (chosen.has(name)) continue;
      chart.end.abort();
      chart.box.remove();
      drawn.delete(name);
    }
    for (const field of usable) {
      if (!chosen.has(field.name)) continue;
      if (!drawn.has(field.name)) drawn.set(field.name, drawOne(field));
      place.append(/** @type {any} */ (drawn.get(field.name)).box);  // in the order of the fields
    }
  };

  const drawOne = (/** @type {any} */ field) => {
    const end = new AbortController();
    const both = AbortSignal.any([end.signal, signal]);
    const canvas = h("div");
    const note = h("p.soft", { role: "status" }, "Loading…");
    const width = field.kind === "scalar" ? 1 : field.shape[0];
    const label = (/** @type {number} */ part) => (field.kind === "scalar" ? field.name : `${field.name}[${part}]`);
    /** Values by component, then by step. @type {(number | null)[][]} */
    const columns = Array.from({ length: width }, () => []);
    /** @type {import("../chart.js").Chart | null} */
    let chart = null;
    const parts = () => chosen.get(field.name) ?? [];
    const picker = width === 1 || field.kind === "scalar" ? null : h("fieldset.row", null, h("legend", null, `Components of ${field.name}`),
      Array.from({ length: Math.min(width, MOST_COMPONENTS) }, (_, part) => {
        const box = h("input", { type: "checkbox", checked: parts().includes(part), change: () => {
          chosen.set(field.name, [...parts().filter((one) => one !== part), ...(box.checked ? [part] : [])].sort((a, b) => a - b));
          write();
          update();
        } });
        return h("label.tick", null, box, part);
      }));
    const names = Array.from({ length: width }, (_, part) => label(part));
    const update = () => {
      const lines = parts().length ? parts() : [0];
      const steps = Array.from({ length: columns[0].length }, (_, at) => first + at);
      const { x, columns: thinned } = thin(steps, lines.map((part) => columns[part]), Math.floor(MOST_POINTS / lines.length));
      const series = lines.map((part, number) => ({ label: names[part], values: thinned[number], colour: colourOf(names[part], names), steps: field.dtype !== "float32" && field.dtype !== "float64" }));
      if (chart) chart.setData(x, series);
      else {
        chart = lineChart(canvas, { title: `${field.name} over the steps of the episode`, x, series, xLabel: "step", height: 150, sync: `episode-${id}`, signal: both, onSelect: (at) => seek(Math.round(at) - first) });
      }
      chart.setCursor(first + cursor);
    };
    let loading = false;
    const load = async () => {
      if (loading) return;
      loading = true;
      try {
        while (columns[0].length < count && !both.aborted) {
          await visible(both);
          const start = columns[0].length;
          const size = Math.min(Math.max(1, Math.floor(CHART_STEPS / width)), count - start);
          const { missing, columns: found } = await loadColumns(params.store, id, [field.name], first + start, size, both);
          const values = [...Array(missing).fill(null), ...found[field.name] ?? []];
          if (values.length === 0) break;
          for (const value of values) columns.forEach((column, part) => column.push(field.kind === "scalar" ? toNumber(value) : toNumber(value?.[part])));
          update();
          note.textContent = columns[0].length < count ? `Loading: ${integer(columns[0].length)} of ${integer(count)} steps` : "";
        }
        note.textContent = "";
      } catch (error) {
        if (!both.aborted) replace(note, errorState(error));
      } finally {
        loading = false;
      }
    };
    load();
    const box = h("div.field-chart", null, h("h3", null, field.name, field.actions ? h("span.soft", null, ` ${field.actions.slice(0, 12).map((/** @type {string} */ name, /** @type {number} */ at) => `${at} ${name.slice(0, 24)}`).join(", ")}`) : null), picker, canvas, note);
    return { end, box, extend: load, setCursor: (/** @type {number} */ step) => chart?.setCursor(first + step) };
  };

  draw();
  return {
    element,
    setCursor(/** @type {number} */ step) {
      cursor = step;
      for (const chart of drawn.values()) chart.setCursor(step);
    },
    extend(/** @type {number} */ next) {
      count = next;
      for (const chart of drawn.values()) chart.extend();
    },
  };
}
