// @ts-check
/** What changed in a store: the ranked list, its marks on curves, and the odd episodes. The server finds them. */

import { storeHref } from "./addresses.js";
import { getJson, isHandled, storePath } from "./client.js";
import { errorState, h, refresh, replace } from "./dom.js";
import { integer, shorten, time } from "./format.js";
import { repeat } from "./live.js";
import { table } from "./table.js";

/** Milliseconds between two looks at a store that grows. The server may answer with a list of a minute ago. */
const PAUSE = 10_000;
/** Number of changes that are always shown. */
const MOST_SHOWN = 5;

/**
 * A change, as `GET .../changes` returns it.
 *
 * @typedef {{kind: "drop" | "change" | "improvement", by: string, where: string, since: number, episode_id: number,
 *   row_id: number | null, version: number | null, episodes: number, score: number, reason: string}} Change
 */

/**
 * The marks of changes on curves: where they begin, on each axis.
 *
 * @param {Change[]} changes
 */
export function marksOf(changes) {
  return changes.map(({ kind, reason, since, episode_id, row_id, version }) => ({
    kind,
    label: shorten(reason.split(": ")[0], 30),
    at: { episode: episode_id, rows: row_id, time: since, version },
  }));
}

/** A change in words. @param {Change} change */
export function sentence({ since, row_id, reason }) {
  const row = row_id === null ? "" : ` (row ${integer(row_id)})`;
  return `since ${time(since).slice(0, -3)}${row}, ${reason}`;
}

/**
 * A change in words, which leads to its episodes, those with the lowest return first.
 *
 * @param {string} store @param {Change} change @param {boolean} canFilter Whether the server answers SQL.
 */
export function changeLink(store, change, canFilter) {
  const text = sentence(change);
  return [
    h(`span.badge.${change.kind}`, null, change.kind),
    " ",
    canFilter
      ? h("a", { href: storeHref(store, "/episodes", { where: change.where, order: "return" }) }, text)
      : h("span", null, text),
    " ",
    h("span.soft", null, `${integer(change.episodes)} episodes, score ${change.score.toFixed(1)}`),
  ];
}

/**
 * Draw the changes and the odd episodes of a store, and mark the changes on its curves.
 *
 * Returns a function that is called when the store has grown.
 *
 * @param {HTMLElement} place
 * @param {import("./app.js").Context} context
 * @param {any} curves Its `setMarks` draws the marks, if it has one.
 */
export function drawChanges(place, context, curves) {
  const { params, server, signal } = context;
  const [list, odd] = [h("div"), h("div")];
  const details = h("details", { toggle: () => details.open && drawOdd(odd, params.store, signal) }, [
    h("summary", null, "Odd episodes"),
    odd,
  ]);
  let hasGrown = true;
  const look = async () => {
    if (!hasGrown) return;
    hasGrown = false;
    try {
      const found = await getJson(storePath(params.store, "/changes"), { query: { limit: 20 }, signal });
      hasGrown = found.measured < found.compared;
      curves.setMarks?.(marksOf(found.changes));
      refresh(list, found, () => changeList(params.store, found, server.sql));
      place.hidden = found.compared === 0;
      if (!place.hasChildNodes()) replace(place, h("h2", { id: "changes-title" }, "What changed"), list, details);
    } catch (error) {
      if (signal.aborted || isHandled(error)) return;
      place.hidden = false;
      replace(place, h("h2", { id: "changes-title" }, "What changed"), errorState(error));
    }
  };
  repeat(PAUSE, look, signal);
  return () => {
    hasGrown = true;
  };
}

/** @param {string} store @param {{compared: number, measured: number, changes: Change[]}} found @param {boolean} canFilter */
function changeList(store, { compared, measured, changes }, canFilter) {
  const item = (/** @type {Change} */ change) => h("li", null, changeLink(store, change, canFilter));
  const rest = changes.slice(MOST_SHOWN);
  return [
    changes.length
      ? h("ol.changes", null, changes.slice(0, MOST_SHOWN).map(item))
      : h("p.soft", null, `${integer(compared)} episodes were compared; no group of them changed.`),
    rest.length
      ? h("details", null, h("summary", null, `${integer(rest.length)} more`), h("ol.changes", null, rest.map(item)))
      : null,
    measured < compared
      ? h("p.hint", null, `${integer(measured)} of ${integer(compared)} episodes are measured so far.`)
      : null,
  ];
}

/** @param {HTMLElement} place @param {string} store @param {AbortSignal} signal */
async function drawOdd(place, store, signal) {
  replace(place, h("p.soft", null, "Comparing episodes …"));
  try {
    const found = await getJson(storePath(store, "/odd"), { query: { limit: 20 }, signal });
    const step = (/** @type {any} */ row) => (row.step === null ? {} : { step: row.step });
    replace(
      place,
      h("p.hint", null, `${integer(found.odd)} of ${integer(found.compared)} episodes differ from their peers.`),
      found.episodes.length
        ? table({
            label: "Odd episodes, the oddest first",
            rows: found.episodes,
            columns: [
              {
                key: "episode_id",
                title: "Episode",
                isNumber: true,
                draw: (row) =>
                  h("a", { href: storeHref(store, `/episodes/${row.episode_id}`, step(row)) }, integer(row.episode_id)),
              },
              { key: "source", title: "Source", draw: (row) => shorten(row.source ?? "", 30) },
              { key: "score", title: "Score", isNumber: true, draw: (row) => row.score.toFixed(1) },
              { key: "reason", title: "Reason" },
            ],
          })
        : null,
    );
  } catch (error) {
    if (!signal.aborted && !isHandled(error)) replace(place, errorState(error));
  }
}

/**
 * Draw the strongest change of each of some stores, one store after the other.
 *
 * @param {HTMLElement} place @param {string[]} stores @param {import("./app.js").Context} context
 */
export async function drawFirstChanges(place, stores, { server, signal }) {
  /** @type {HTMLElement[]} */
  const items = [];
  for (const store of stores) {
    if (signal.aborted) return;
    try {
      const { changes } = await getJson(storePath(store, "/changes"), { query: { limit: 20 }, signal });
      if (!changes.length || changes[0].kind === "improvement") continue;
      items.push(
        h("li", null, h("a", { href: storeHref(store) }, store), ": ", changeLink(store, changes[0], server.sql)),
      );
      replace(place, h("h2", null, "What changed"), h("ul.changes", null, items));
    } catch (error) {
      if (signal.aborted) return; // what is wrong with a store is said in the list of stores
    }
  }
}
