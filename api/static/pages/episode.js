// @ts-check
/** One episode: its frames, values, texts and facts. */

import { storeHref } from "../addresses.js";
import { getJson, storePath } from "../client.js";
import { debounce, emptyState, errorState, h, relativeTime, replace } from "../dom.js";
import { FILTER, getEpisode, hasFilter, neighbourOf, readFilter, writeFilter } from "../episode_data.js";
import { integer, number } from "../format.js";
import { groupHref, groupOf } from "../groups.js";
import { watch } from "../live.js";
import { createPlayer } from "../player.js";
import { drawSelections } from "../selections.js";
import { facts as factList } from "../table.js";
import { drawCharts } from "./episode/charts.js";
import { drawConversation } from "./episode/conversation.js";
import { drawFacts } from "./episode/facts.js";
import { elementsOf, withoutNext } from "./episode/fields.js";
import { findMessages } from "./episode/messages.js";
import { loadColumns, RowCache } from "./episode/rows.js";
import { drawTexts } from "./episode/texts.js";
import { drawValues } from "./episode/values.js";

/** @typedef {import("../app.js").Context} Context */
/** @typedef {import("../episode_data.js").Episode} Episode */
/** @typedef {import("./episode/fields.js").Field} Field */

/** Larger arrays are neither fetched nor drawn, except images. */
const MOST_ELEMENTS = 1024;

/** @param {Record<string, string>} params */
export function title(params) {
  return `Episode ${params.episode} · ${params.store}`;
}

/** @param {HTMLElement} root @param {Context} context */
export async function render(root, context) {
  const { params, query, server, signal } = context;
  const { store } = params;
  const id = Number(params.episode);
  const filter = readFilter(query);
  const list = storeHref(store, "/episodes", writeFilter(filter));
  const [summary, episode] = await Promise.all([
    getJson(storePath(store, "/summary"), { signal }),
    getEpisode(store, id, signal),
  ]);
  if (episode === null) {
    const link = h("a", { href: list }, "All episodes");
    replace(root, h("h1", null, `Episode ${id}`), emptyState(`Store ${store} has no episode ${id}.`, link));
    return;
  }
  const header = h("div");
  const about = h("div.card");
  const hasMessages = findMessages(summary.fields) !== null;
  const asSteps = !hasMessages || query.get("view") === "steps";
  /** @type {[string, any][]} */
  const added = [];
  const drawAbout = () => replace(about, factList([...describe(episode, store), ...added]));
  if (hasMessages) {
    const address = storeHref(store, `/episodes/${id}`, { ...writeFilter(filter), view: asSteps ? "" : "steps" });
    added.push(["View", h("a", { href: address }, asSteps ? "As a conversation" : "As steps")]);
    if (server.sql) addGroup(added, store, id, signal).then(drawAbout, () => {});
  }
  replace(root, header, about);
  drawAbout();
  const age = h("p.hint");
  drawAge(age, episode, summary, store, signal);
  root.append(age);
  drawHeader(header, context, episode, filter, list);
  const facts = [drawFacts(context, episode), drawSelections(context, episode)];
  if (episode.live_rows === 0) {
    const hint = "Its facts stay. To keep the rows of such episodes, give the store a larger capacity.";
    root.append(emptyState("The rows of this episode have left the store.", hint), ...facts);
    return;
  }
  const steps = (asSteps ? drawSteps : drawConversation)(context, episode, summary.fields);
  root.append(h("div.episode", null, h("div.column", null, steps.main), h("div.column.side", null, steps.side, facts)));
  if (episode.status !== "open") return;
  watch(
    store,
    async () => {
      const now = await getEpisode(store, id, signal);
      if (now === null || signal.aborted) return;
      const hasGrown = now.length !== episode.length;
      const isChanged = now.status !== episode.status || now.live_rows !== episode.live_rows;
      Object.assign(episode, { ...now, info: episode.info });
      if (hasGrown || isChanged) drawAbout();
      if (hasGrown) steps.extend();
    },
    signal,
  );
}

/**
 * Draw what moves with the step that is shown: the player, and the charts, values and texts that follow it.
 *
 * @param {Context} context
 * @param {Episode} episode
 * @param {Field[]} fields
 */
function drawSteps(context, episode, fields) {
  const { query, setQuery, signal, params } = context;
  const { store } = params;
  const id = episode.episode_id;
  // Steps are counted from the first one that is in the store now. Steps that leave it later keep their numbers.
  const first = episode.length - episode.live_rows;
  const count = () => episode.length - first;
  const images = fields.filter((field) => field.kind === "image");
  const others = fields.filter((field) => field.kind !== "image" && elementsOf(field) <= MOST_ELEMENTS);
  const names = others.map((field) => field.name);
  const rows = new RowCache({
    load: (start, steps) => loadColumns(store, id, names, first + start, steps, signal),
    count,
  });
  const values = drawValues(rows, others, first);
  const texts = drawTexts(rows, others, context);
  const selection = new ImageSelection(images, context);
  const asked = Number(query.get("step") ?? first);
  const player = createPlayer({
    store,
    episode: id,
    fields: selection.fields(),
    first,
    count: count(),
    step: Number.isFinite(asked) ? asked - first : 0,
    speed: Number(query.get("speed")) || 1,
    loop: query.get("loop") === "1",
    controls: images.length ? "all" : "steps",
    signal,
    onStep: (step) => show(step),
    onRest: debounce(300, (step) => setQuery({ step: first + step })),
    onChange: ({ speed, loop }) => {
      if (speed !== undefined) setQuery({ speed: speed === 1 ? "" : speed });
      if (loop !== undefined) setQuery({ loop: loop ? "1" : "" });
    },
  });
  const charts = drawCharts(context, { id, fields: others, first, count: count(), seek: player.seek });
  const show = (/** @type {number} */ step) => {
    charts.setCursor(step);
    values.show(step);
    texts.show(step);
  };
  if (images.length > 1) player.element.append(selection.draw(() => player.setFields(selection.fields())));
  show(player.step());
  return {
    main: [player.element, texts.element, charts.element],
    side: values.element,
    /** Show the steps that were added to the episode. */
    extend() {
      rows.clear();
      player.setCount(count());
      charts.extend(count());
    },
  };
}

/** The image fields that the reader has chosen. */
class ImageSelection {
  /** @param {Field[]} images @param {Context} context */
  constructor(images, { query, setQuery }) {
    this.images = images;
    this.setQuery = setQuery;
    const names = (query.get("images") ?? "").split(",").filter(Boolean);
    this.first = withoutNext(images).map((field) => field.name);
    this.names = new Set(names.length ? names : this.first);
  }

  fields() {
    return this.images.filter((field) => this.names.has(field.name));
  }

  /** @param {() => void} onChange */
  draw(onChange) {
    const tick = (/** @type {Field} */ field) => {
      const change = () => {
        if (box.checked) this.names.add(field.name);
        else this.names.delete(field.name);
        const chosen = this.fields().map((each) => each.name);
        this.setQuery({ images: chosen.join() === this.first.join() ? "" : chosen.join(",") || "none" });
        onChange();
      };
      const box = h("input", { type: "checkbox", checked: this.names.has(field.name), change });
      return h("label.tick", null, box, field.name);
    };
    return h("fieldset.row", null, h("legend", null, "Images"), this.images.map(tick));
  }
}

/** @param {[string, any][]} pairs @param {string} store @param {number} id @param {AbortSignal} signal */
async function addGroup(pairs, store, id, signal) {
  const group = await groupOf(store, id, signal);
  if (group === null) return;
  const link = h("a", { href: groupHref(store, group) }, h("bdi", null, group.key ?? group.group_id));
  pairs.unshift(["Group", [link, ` (${group.status}, mean return ${number(group.mean_return)})`]]);
}

/**
 * Say how many rows were written after the last one of an episode.
 *
 * @param {HTMLElement} place @param {Episode} episode @param {any} summary @param {string} store
 * @param {AbortSignal} signal
 */
async function drawAge(place, episode, summary, store, signal) {
  if (episode.live_rows === 0 || !summary.fields.length) return;
  const query = { fields: summary.fields.at(-1).name, start: episode.length - 1, count: 1 };
  try {
    const { rows } = await getJson(storePath(store, `/episodes/${episode.episode_id}`), { query, signal });
    place.textContent = `${integer(summary.written - rows.id[0])} rows were written after it.`;
  } catch {
    // The rest of the page is as useful without.
  }
}

/** @param {Episode} episode @param {string} store @returns {[string, any][]} */
function describe(episode, store) {
  const source = h("a", { href: storeHref(store, "/episodes", { source: episode.source }) }, episode.source);
  /** @type {[string, any][]} */
  const pairs = [
    ["Status", h(`span.badge.${episode.status}`, null, episode.status)],
    ["Return", number(episode.return)],
    ["Length", integer(episode.length)],
    ["Source", source],
    ["Started", relativeTime(episode.start_time)],
    ["Ended", episode.status === "open" ? "still open" : relativeTime(episode.end_time)],
  ];
  if (episode.live_rows !== episode.length)
    pairs.push(["Steps in the store", `the last ${integer(episode.live_rows)}`]);
  if (episode.trajectory_id !== null) pairs.push(["Trajectory id", episode.trajectory_id]);
  return pairs;
}

/**
 * Draw the title, and links to the episodes before and after under the filter.
 *
 * @param {HTMLElement} header
 * @param {Context} context
 * @param {Episode} episode
 * @param {import("../episode_data.js").Filter} filter
 * @param {string} list Address of the list of episodes under the filter.
 */
async function drawHeader(header, { params, query, server, signal }, episode, filter, list) {
  const { store } = params;
  const state = [...FILTER, "speed", "loop", "images", "plots", "colour", "view"];
  const entries = Object.fromEntries(state.map((name) => [name, query.get(name)]));
  const links = h("nav.row", { "aria-label": "Episodes" });
  const pair = storeHref(store, "/pair", { b: episode.episode_id, source: episode.source });
  replace(header, h("div.heading", null, h("h1", null, `Episode ${episode.episode_id}`), links));
  const link = (/** @type {number | null} */ id, /** @type {string} */ text, /** @type {string} */ rel) =>
    id === null
      ? h("span.soft", null, text)
      : h("a.button", { href: storeHref(store, `/episodes/${id}`, entries), rel }, text);
  const draw = (/** @type {number | null} */ previous, /** @type {number | null} */ next) =>
    replace(
      links,
      link(previous, "← Previous", "prev"),
      link(next, "Next →", "next"),
      h("a", { href: list }, hasFilter(filter) ? "Episodes of this filter" : "All episodes"),
      server.sql ? h("a", { href: pair }, "Compare with the best of its source") : null,
    );
  draw(null, null);
  try {
    const [previous, next] = await Promise.all([
      neighbourOf(store, episode, filter, -1, server.sql, signal),
      neighbourOf(store, episode, filter, 1, server.sql, signal),
    ]);
    draw(previous, next);
  } catch (error) {
    if (!signal.aborted) links.append(errorState(error));
  }
}
