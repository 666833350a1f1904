// @ts-check
/** Episodes of a store: filtered, sorted, and read page by page. */

import { storeHref } from "../addresses.js";
import { ApiError, getJson, readJson, request, storePath } from "../client.js";
import { announce, emptyState, errorState, h, relativeTime, replace } from "../dom.js";
import { changeFacts, episodesOf, formatFact, hasFilter, requestQuery, writeFilter } from "../episode_data.js";
import { coloursOf, swatch } from "../facets.js";
import { createFilter } from "../filter.js";
import { integer, number } from "../format.js";
import { watch } from "../live.js";
import { drawFrame, loadFrames } from "../player.js";
import { table } from "../table.js";

/** Episodes of a page. */
const PAGE = 50;
/** Requests for frames at a time. */
const REQUESTS = 4;
/** Pixels of the longer side of a small frame. */
const SIDE = 64;
/** Small frames that are kept, in episodes. */
const MOST_KEPT = 400;
/** Facts of an episode that its row shows. */
const MOST_FACTS = 5;
/** Longest text of a fact in a row. */
const MOST_LETTERS = 32;
/** The newest first. */
const ORDER = "-episode_id";

/** @param {Record<string, string>} params */
export function title(params) {
  return `Episodes · ${params.store}`;
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, context) {
  const { params, query, setQuery, signal, server } = context;
  const { store } = params;
  let page = query.get("page") ?? "";
  const [{ fields }, colours] = await Promise.all([
    getJson(storePath(store, "/summary"), { signal }),
    coloursOf(store, "source"),
  ]);
  const images = fields
    .filter((/** @type {any} */ field) => field.kind === "image")
    .map((/** @type {any} */ field) => field.name);
  let image = images.includes(query.get("image")) ? query.get("image") : (images[0] ?? null);

  const imageChoice =
    images.length < 2
      ? null
      : h(
          "label.row",
          null,
          "Frames of",
          h(
            "select",
            {
              change: (/** @type {Event} */ event) => {
                image = /** @type {HTMLSelectElement} */ (event.target).value;
                setQuery({ image: image === images[0] ? "" : image });
                frames.setField(image);
                load();
              },
            },
            images.map((/** @type {string} */ name) => h("option", { value: name, selected: name === image }, name)),
          ),
        );
  const filters = createFilter(context, {
    more: imageChoice,
    onChange: () => {
      page = "";
      load();
    },
  });
  const fresh = h("button.fresh", {
    type: "button",
    hidden: true,
    click: () => {
      page = "";
      setQuery({ page }, { push: true });
      load();
    },
  });
  const pair = h("a", { hidden: !server.sql }, "Best and worst");
  const count = h("p.soft", { role: "status" });
  const body = h("div");
  const edits = h("div", { role: "alert" });
  const previous = h("button", { type: "button", disabled: true, click: () => go(cursors.previous) }, "← Previous");
  const next = h("button", { type: "button", disabled: true, click: () => go(cursors.next) }, "Next →");
  /** @type {{previous: string | null, next: string | null}} */
  const cursors = { previous: null, next: null };
  const frames = new FrameLoader(store, image, signal);
  /** Number of episodes when the table was filled; null: not known yet. @type {number | null} */
  let known = null;
  let latestCount = 0;

  replace(
    root,
    h("div.heading", null, h("h1", null, "Episodes"), count, fresh, pair),
    filters.element,
    edits,
    body,
    h("nav.row.pager", { "aria-label": "Pages of episodes" }, previous, next),
  );

  const go = (/** @type {string | null} */ cursor) => {
    if (cursor === null) return;
    page = cursor;
    setQuery({ page }, { push: true });
    load(true);
  };
  /** The newest request for the table; earlier ones are aborted. */
  let attempt = new AbortController();
  async function load(toTop = false) {
    attempt.abort();
    attempt = new AbortController();
    const both = AbortSignal.any([signal, attempt.signal]);
    const filter = filters.current();
    pair.href = storeHref(store, "/pair", writeFilter(filter));
    body.setAttribute("aria-busy", "true");
    try {
      const response = await request(storePath(store, "/episodes"), {
        query: server.sql
          ? { ...requestQuery(filter), order: filter.order || ORDER, limit: PAGE, page }
          : { source: filter.source, status: filter.status, limit: PAGE, page },
        signal: both,
      });
      const episodes = episodesOf(await readJson(response));
      cursors.previous = response.headers.get("X-Previous");
      cursors.next = response.headers.get("X-Next");
      const total = response.headers.get("X-Total");
      count.textContent =
        total === null
          ? `${integer(episodes.length)} on this page`
          : `${integer(Number(total))} ${Number(total) === 1 ? "episode" : "episodes"}${hasFilter(filter) ? " match" : ""}`;
      known = null;
      fresh.hidden = true;
      draw(episodes);
      if (toTop) {
        body.querySelector(".scroll")?.scrollTo(0, 0);
        announce(`${episodes.length} episodes`);
      }
    } catch (error) {
      if (both.aborted) return;
      cursors.previous = null;
      cursors.next = null;
      const isRefused = error instanceof ApiError && error.status >= 400 && error.status < 500;
      const isCondition = server.sql && isRefused && filter.where;
      if (isCondition) {
        filters.showError(error);
        replace(body);
        count.textContent = "";
      } else {
        replace(body, errorState(error), page ? h("p", null, firstPageButton()) : null);
      }
    } finally {
      if (!both.aborted) {
        body.removeAttribute("aria-busy");
        previous.disabled = cursors.previous === null;
        next.disabled = cursors.next === null;
      }
    }
  }

  function firstPageButton() {
    const click = () => {
      page = "";
      setQuery({ page });
      load();
    };
    return h("button", { type: "button", click }, "First page");
  }

  /** @param {import("../episode_data.js").Episode[]} episodes */
  function draw(episodes) {
    const filter = filters.current();
    frames.reset();
    pair.hidden = !server.sql || episodes.length === 0;
    if (episodes.length === 0) {
      replace(
        body,
        hasFilter(filter)
          ? emptyState(
              "No episode matches.",
              h("button", { type: "button", click: filters.clear }, "Remove all filters"),
            )
          : page
            ? emptyState("There are no more episodes.", firstPageButton())
            : emptyState(
                "There are no episodes yet.",
                "They appear here when a program writes rows, for instance with ",
                h("code", null, "expstore collect"),
                " or ",
                h("code", null, "rb.extend"),
                ".",
              ),
      );
      return;
    }
    const order = filter.order || ORDER;
    const columns = columnsOf(context, { image, frames, filters, colours, edit });
    const focused = body.contains(document.activeElement) ? document.activeElement?.closest("th") : null;
    const position = focused ? [.../** @type {HTMLElement} */ (focused.parentElement).children].indexOf(focused) : -1;
    const left = body.querySelector(".scroll")?.scrollLeft ?? 0;
    const made = table({
      label: "Episodes",
      columns,
      rows: episodes,
      order,
      onSort: server.sql ? (chosen) => filters.change({ order: chosen === ORDER ? "" : chosen }) : undefined,
    });
    made.classList.add("tall");
    replace(body, made);
    made.scrollLeft = left;
    if (position >= 0)
      /** @type {HTMLElement | null} */ (made.querySelectorAll("thead th")[position]?.querySelector("button"))?.focus();
  }

  /** Change a fact; undo the change of the control if the server refuses it. */
  async function edit(
    /** @type {any} */ episode,
    /** @type {Record<string, any>} */ changes,
    /** @type {() => void} */ undo,
  ) {
    replace(edits);
    try {
      episode.info = await changeFacts(store, episode.episode_id, changes, signal);
      announce(`Episode ${episode.episode_id} saved`);
    } catch (error) {
      if (signal.aborted) return;
      undo();
      replace(edits, errorState(error));
    }
  }

  await load();
  watch(
    store,
    (event) => {
      latestCount = event.episodes;
      if (known === null) known = latestCount;
      const more = latestCount - known;
      if (more <= 0) return;
      fresh.hidden = false;
      fresh.textContent = `${integer(more)} new ${more === 1 ? "episode" : "episodes"}, show`;
    },
    signal,
  );
}

/**
 * @param {import("../app.js").Context} context
 * @param {object} options
 * @param {string | null} options.image The field whose frames are drawn.
 * @param {FrameLoader} options.frames
 * @param {ReturnType<typeof createFilter>} options.filters
 * @param {import("../facets.js").Colours} options.colours Of the sources.
 * @param {(episode: any, changes: any, undo: () => void) => void} options.edit Change facts of an episode.
 * @returns {import("../table.js").Column[]}
 */
function columnsOf({ params, server, query }, { image, frames, filters, colours, edit }) {
  const open = (/** @type {any} */ row) =>
    storeHref(params.store, `/episodes/${row.episode_id}`, {
      ...writeFilter(filters.current()),
      images: query.get("images"),
    });
  const canWrite = server.access === "write";
  const cut = (/** @type {string} */ text) =>
    text.length > MOST_LETTERS ? `${text.slice(0, MOST_LETTERS - 1)}…` : text;
  const factChip = (/** @type {string} */ name, /** @type {any} */ value) => {
    // The text that SQL compares: ->> returns texts without quotes.
    const text = typeof value === "string" ? value : JSON.stringify(value);
    const label = `${cut(name)}: ${cut(text)}`;
    return server.sql
      ? h(
          "button.chip",
          {
            type: "button",
            title: `Only episodes with ${name.slice(0, 200)}: ${text.slice(0, 200)}`,
            click: () => filters.change({ facts: { ...filters.current().facts, [name]: text } }),
          },
          h("bdi", null, label),
        )
      : h("span.chip", null, h("bdi", null, label));
  };
  return [
    {
      key: "episode_id",
      title: "Episode",
      isNumber: true,
      canSort: true,
      draw: (row) => h("a", { href: open(row) }, row.episode_id),
    },
    ...(image === null
      ? []
      : [{ key: "frames", title: "First and last", draw: (/** @type {any} */ row) => frames.place(row, open(row)) }]),
    { key: "return", title: "Return", isNumber: true, canSort: true, draw: (row) => number(row.return) },
    { key: "length", title: "Length", isNumber: true, canSort: true, draw: (row) => integer(row.length) },
    {
      key: "status",
      title: "Status",
      canSort: true,
      draw: (row) =>
        h(
          `button.badge.${row.status}`,
          { type: "button", title: `Only ${row.status} episodes`, click: () => filters.change({ status: row.status }) },
          row.status,
        ),
    },
    {
      key: "source",
      title: "Source",
      canSort: true,
      draw: (row) => [
        swatch(colours(row.source)),
        " ",
        h(
          "button.link",
          {
            type: "button",
            title: `Only episodes of ${row.source}`,
            click: () => filters.change({ source: row.source }),
          },
          h("bdi", null, cut(row.source)),
        ),
      ],
    },
    {
      key: "info",
      title: "Facts",
      draw: (row) => {
        const entries = Object.entries(row.info).filter(([name]) => name !== "flag" && name !== "note");
        const rest = entries.length - MOST_FACTS;
        return h(
          "div.chips",
          null,
          entries.slice(0, MOST_FACTS).map(([name, value]) => factChip(name, value)),
          rest > 0 ? h("a", { href: open(row) }, `${rest} more`) : null,
        );
      },
    },
    {
      key: "flag",
      title: "Flag",
      draw: (row) => {
        const box = h("input", {
          type: "checkbox",
          checked: row.info.flag === true,
          disabled: !canWrite,
          "aria-label": `Flag episode ${row.episode_id}`,
          change: () =>
            edit(row, { flag: box.checked || null }, () => {
              box.checked = !box.checked;
            }),
        });
        return box;
      },
    },
    {
      key: "note",
      title: "Note",
      draw: (row) => {
        const text =
          row.info.note === undefined
            ? ""
            : typeof row.info.note === "string"
              ? row.info.note
              : formatFact(row.info.note);
        if (!canWrite) return h("bdi", { title: text.slice(0, 1000) }, cut(text));
        const input = h("input.note", {
          value: text,
          "aria-label": `Note on episode ${row.episode_id}`,
          autocomplete: "off",
          change: () =>
            edit(row, { note: input.value.trim() || null }, () => {
              input.value = text;
            }),
        });
        return input;
      },
    },
    { key: "end_time", title: "Ended", canSort: true, draw: (row) => relativeTime(row.end_time) },
  ];
}

/** Fetches the first and the last frame of the rows that can be seen, a few at a time. */
class FrameLoader {
  /** @param {string} store @param {string | null} field @param {AbortSignal} signal */
  constructor(store, field, signal) {
    this.store = store;
    this.field = field;
    this.signal = signal;
    /**
     * Frames by field, episode and length, since open episodes grow.
     *
     * @type {Map<string, import("../player.js").Frame[]>}
     */
    this.kept = new Map();
    /** @type {Map<Element, {row: any, canvases: HTMLCanvasElement[], note: HTMLElement}>} */
    this.places = new Map();
    /** @type {Set<Element>} */
    this.visible = new Set();
    /** @type {Map<Element, AbortController>} */
    this.loads = new Map();
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) this.visible.add(entry.target);
        else this.visible.delete(entry.target);
      }
      this.#next();
    });
    signal.addEventListener("abort", () => this.observer.disconnect(), { once: true });
    document.addEventListener("visibilitychange", () => this.#next(), { signal });
  }

  /** @param {string | null} field */
  setField(field) {
    this.field = field;
  }

  /** Forget the places of the former table. */
  reset() {
    this.observer.disconnect();
    for (const load of this.loads.values()) load.abort();
    this.loads.clear();
    this.visible.clear();
    this.places.clear();
  }

  /** @param {any} row @param {string} target Address that the frames link to. */
  place(row, target) {
    if (row.live_rows === 0) return h("span.soft", null, "not stored");
    const canvases = ["First", "Last"].map((name) =>
      h("canvas.thumb", {
        width: "1",
        height: "1",
        role: "img",
        "aria-label": `${name} frame of episode ${row.episode_id}`,
      }),
    );
    const note = h("span.soft");
    const element = h("a.thumbs", { href: target, tabindex: "-1" }, canvases, note);
    const kept = this.kept.get(this.#key(row));
    if (kept) this.#draw(canvases, kept);
    else {
      this.places.set(element, { row, canvases, note });
      this.observer.observe(element);
    }
    return element;
  }

  /** @param {any} row */
  #key(row) {
    return `${this.field} ${row.episode_id} ${row.length}`;
  }

  /** @param {HTMLCanvasElement[]} canvases @param {import("../player.js").Frame[]} frames */
  #draw(canvases, frames) {
    canvases.forEach((canvas, number) => drawFrame(canvas, frames[number] ?? frames[0]));
  }

  #next() {
    if (document.hidden || this.signal.aborted) return;
    for (const element of this.visible) {
      if (this.loads.size >= REQUESTS) return;
      const place = this.places.get(element);
      if (place && !this.loads.has(element)) this.#load(element, place);
    }
  }

  /** @param {Element} element @param {{row: any, canvases: HTMLCanvasElement[], note: HTMLElement}} place */
  async #load(element, { row, canvases, note }) {
    const abort = new AbortController();
    this.loads.set(element, abort);
    const key = this.#key(row);
    try {
      const frames = await loadFrames({
        store: this.store,
        episode: row.episode_id,
        field: /** @type {string} */ (this.field),
        select: { steps: "0,-1" },
        side: SIDE,
        signal: AbortSignal.any([abort.signal, this.signal]),
      });
      this.kept.set(key, frames);
      const oldest = this.kept.keys().next().value;
      if (this.kept.size > MOST_KEPT && oldest !== undefined) this.kept.delete(oldest);
      if (frames.length) this.#draw(canvases, frames);
    } catch (/** @type {any} */ error) {
      if (abort.signal.aborted || this.signal.aborted) return;
      note.textContent = "no frames";
      note.title = error?.message ?? "";
    }
    // Once tried, a place is not asked for again.
    this.places.delete(element);
    this.observer.unobserve(element);
    this.visible.delete(element);
    this.loads.delete(element);
    this.#next();
  }
}
