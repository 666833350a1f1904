// @ts-check
/**
 * Tell a page when its store has changed: `watch` listens to the server's events, `repeat` polls. Nothing is asked
 * for while the tab is hidden.
 *
 * Why there are both:
 * - Events say that a store has grown, but not by what. A page that listens asks for the rest itself, and less often
 *   than events arrive: a writer must not slow down for readers.
 * - Ages, rates and priorities change without new rows, and a proxy may keep events back. The page of a store
 *   therefore polls its summary: often after an event, seldom without one.
 * - Pages of several stores only poll. A stream of events occupies a connection, and a browser opens six to a server.
 * - Pages of episodes only listen: an episode that is stored changes by new rows alone.
 */

import { request, storePath } from "./client.js";

/**
 * Call a function when a store has grown, at most once a second, until the signal is aborted.
 *
 * The server's event stream is read by fetch, since EventSource cannot send a token. It is opened again after
 * an interruption, with growing pauses.
 *
 * @param {string} store
 * @param {(event: {rows: number, written: number, episodes: number, generation: number}) => any} act
 * @param {AbortSignal} signal
 */
export async function watch(store, act, signal) {
  let pause = 1000;
  while (!signal.aborted) {
    await visible(signal);
    const hidden = new AbortController();
    const stop = () => {
      if (document.hidden) hidden.abort();
    };
    document.addEventListener("visibilitychange", stop);
    try {
      const both = AbortSignal.any([signal, hidden.signal]);
      const response = await request(storePath(store, "/events"), { accept: "text/event-stream", signal: both });
      for await (const data of events(response)) {
        pause = 1000;
        await act(JSON.parse(data));
      }
    } catch {
      // The stream ended, or the server is gone: try again.
    } finally {
      document.removeEventListener("visibilitychange", stop);
    }
    if (!signal.aborted && !document.hidden) await sleep(pause, signal);
    pause = Math.min(2 * pause, 15_000);
  }
}

/**
 * Call a function at once, and again some milliseconds after each call has ended, while the tab is visible.
 *
 * The first call's error is thrown. Later ones are ignored: the frame of the page says that the server is gone.
 *
 * @param {number} milliseconds
 * @param {() => any} act
 * @param {AbortSignal} signal
 */
export async function repeat(milliseconds, act, signal) {
  await act();
  (async () => {
    while (!signal.aborted) {
      await sleep(milliseconds, signal);
      await visible(signal);
      if (signal.aborted) return;
      try {
        await act();
      } catch {
        // The next call may succeed.
      }
    }
  })();
}

/** @param {Response} response */
async function* events(response) {
  const reader = /** @type {ReadableStream} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    const pieces = (text + value).split("\n\n");
    text = /** @type {string} */ (pieces.pop());
    for (const piece of pieces) {
      const lines = piece.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trim()).join("\n");
    }
  }
}

/** @param {number} milliseconds @param {AbortSignal} signal @returns {Promise<void>} */
export function sleep(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        resolve();
      },
      { once: true },
    );
  });
}

/** @param {AbortSignal} signal @returns {Promise<void>} Resolved once the tab is visible, or the signal aborted. */
export function visible(signal) {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look, { once: true });
    look();
  });
}
