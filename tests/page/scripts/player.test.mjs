import assert from "node:assert/strict";
import { test } from "node:test";

import { FrameCache } from "../../../api/static/player.js";

/** Return once all promises that are ready have been followed. */
function followPromises() {
  return new Promise((done) => setImmediate(done));
}

/** A cache whose requests wait until `answer` is called. */
function cacheOf({ count, frameBytes = 1, most = 1_000_000, ...more }) {
  const requests = [];
  const cache = new FrameCache({
    frameBytes,
    most,
    count,
    signal: new AbortController().signal,
    onLoad: () => {},
    onError: () => {},
    load: (start, number, signal) =>
      new Promise((resolve, reject) => requests.push({ start, number, signal, resolve, reject })),
    ...more,
  });
  const frames = (/** @type {any} */ { start, number }) =>
    Array.from({ length: number }, (_, at) => ({ step: start + at, pixels: new Uint8Array(frameBytes) }));
  return { cache, requests, answer: (request) => request.resolve(frames(request)) };
}

test("the window of a step is loaded, then those that follow, two at a time", async () => {
  const { cache, requests, answer } = cacheOf({ count: () => 1000 });
  cache.want(70, 3);
  assert.deepEqual(
    requests.map(({ start, number }) => [start, number]),
    [
      [64, 64],
      [128, 64],
    ],
  );
  assert.equal(cache.get(70), null);
  answer(requests[0]);
  await followPromises();
  assert.equal(cache.get(70).step, 70);
  assert.deepEqual(
    requests.slice(2).map(({ start }) => start),
    [192],
  );
});

test("the last window ends with the episode", () => {
  const { cache, requests } = cacheOf({ count: () => 70 });
  cache.want(65, 3);
  assert.deepEqual(
    requests.map(({ start, number }) => [start, number]),
    [[64, 6]],
  );
});

test("a request for steps that the reader has left is aborted", async () => {
  const { cache, requests, answer } = cacheOf({ count: () => 1000 });
  cache.want(0, 0);
  cache.want(500, 0);
  assert.equal(requests[0].signal.aborted, true);
  answer(requests[0]);
  await followPromises();
  assert.equal(cache.has(0), false);
});

test("a window that grows while it is loaded is loaded again", async () => {
  let count = 10;
  const { cache, requests, answer } = cacheOf({ count: () => count });
  cache.want(0, 0);
  cache.forget(count - 1);
  count = 20;
  cache.want(15, 0);
  for (const request of requests) answer(request);
  await followPromises();
  assert.equal(requests.length, 2);
  assert.equal(cache.get(15).step, 15);
  assert.equal(cache.bytes, 20);
});

test("frames are kept within their bytes", async () => {
  const { cache, requests, answer } = cacheOf({ count: () => 100_000, frameBytes: 1000 });
  let most = 0;
  for (let step = 0; step < 5000; step += 7) {
    while (cache.get(step) === null) {
      cache.want(step, 3);
      const waiting = requests.splice(0);
      assert.ok(waiting.length > 0 && waiting.length <= 2);
      assert.ok(waiting.every(({ number }) => number === 64));
      waiting.forEach(answer);
      await followPromises();
      most = Math.max(most, cache.bytes);
    }
  }
  assert.ok(most > 500_000 && most <= 1_000_000, String(most));
});

test("large frames are loaded in small windows", () => {
  const { cache, requests } = cacheOf({ count: () => 1000, frameBytes: 4 * 1024 * 1024, most: 64 * 1024 * 1024 });
  cache.want(0, 0);
  assert.equal(requests[0].number, 2);
});

test("a step that has left the store is loaded and has no frame", async () => {
  const { cache, requests } = cacheOf({ count: () => 3 });
  cache.want(0, 0);
  const frames = [];
  frames[2] = { step: 2, pixels: new Uint8Array(1) };
  requests[0].resolve(frames);
  await followPromises();
  assert.deepEqual([cache.has(0), cache.get(0), cache.get(2)?.step], [true, null, 2]);
});

test("nothing is asked for after a failure, and in a hidden tab", async () => {
  const errors = [];
  const { cache, requests } = cacheOf({ count: () => 1000, onError: (error) => errors.push(error.message) });
  document.hidden = true;
  cache.want(0, 0);
  document.hidden = false;
  assert.equal(requests.length, 0);
  cache.want(0, 0);
  requests[0].reject(new Error("gone"));
  await followPromises();
  cache.want(500, 0);
  assert.deepEqual([errors, requests.length], [["gone"], 1]);
});
