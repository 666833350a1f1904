// @ts-check
/** Rows of an episode, fetched in windows around the step that is shown. */

import { ApiError, readJson, request, storePath } from "../../client.js";

/** Steps of one request. */
const WINDOW = 64;
/** Windows that are kept. */
const MOST_WINDOWS = 8;

/**
 * Values by field, and how many steps before them have left the store.
 *
 * @typedef {{missing: number, columns: Record<string, any[]>}} Columns
 */

/**
 * Fetch the values of some fields.
 *
 * @param {string} store
 * @param {number} id Of the episode.
 * @param {string[]} names Of the fields.
 * @param {number} start The first step.
 * @param {number} count Number of steps.
 * @param {AbortSignal} signal
 * @returns {Promise<Columns>}
 */
export async function loadColumns(store, id, names, start, count, signal) {
  if (names.length === 0) return { missing: 0, columns: {} };
  const query = { fields: names.join(","), start, count };
  const response = await request(storePath(store, `/episodes/${id}`), { query, signal });
  const first = Number(response.headers.get("X-First-Step") ?? start + count);
  return { missing: first - start, columns: (await readJson(response)).rows };
}

/** Rows of the fields that are not images. */
export class RowCache {
  /**
   * @param {object} options
   * @param {(start: number, count: number) => Promise<Columns>} options.load Fetches steps, counted from the first
   *   one that was in the store when the page was opened.
   * @param {() => number} options.count Number of these steps.
   */
  constructor(options) {
    this.options = options;
    this.size = WINDOW;
    /** @type {Map<number, Promise<Columns>>} */
    this.windows = new Map();
  }

  /**
   * @param {number} step
   * @returns {Promise<Record<string, any> | null>} Values by field; null: the step has left the store.
   */
  async get(step) {
    const size = this.size;
    const start = Math.floor(step / size) * size;
    let window = this.windows.get(start);
    if (!window) {
      window = this.options.load(start, Math.min(size, this.options.count() - start));
      this.windows.set(start, window);
      const oldest = this.windows.keys().next().value;
      if (this.windows.size > MOST_WINDOWS && oldest !== undefined) this.windows.delete(oldest);
    }
    try {
      const { missing, columns } = await window;
      const at = step - start - missing;
      return at < 0 ? null : Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column[at]]));
    } catch (error) {
      this.windows.delete(start);
      // Large texts: fewer rows fit into an answer.
      if (!(error instanceof ApiError) || error.status !== 413 || size === 1) throw error;
      if (this.size === size) {
        this.size = Math.max(1, size >> 2);
        this.windows.clear();
      }
      return this.get(step);
    }
  }

  /** Forget all rows, since the episode has grown. */
  clear() {
    this.windows.clear();
  }
}

/**
 * Return a function that runs one call at a time. Of the calls that arrive meanwhile only the newest follows:
 * during playback the steps in between are left out.
 *
 * @param {(step: number) => Promise<() => void>} load Returns the function that draws what was loaded.
 * @param {(error: any) => void} fail
 */
export function newestOnly(load, fail) {
  let isRunning = false;
  /** @type {number | null} */
  let next = null;
  const run = async (/** @type {number} */ step) => {
    if (isRunning) {
      next = step;
      return;
    }
    isRunning = true;
    try {
      (await load(step))();
    } catch (/** @type {any} */ error) {
      if (error?.name !== "AbortError") fail(error);
    }
    isRunning = false;
    if (next !== null) {
      const again = next;
      next = null;
      run(again);
    }
  };
  return run;
}
