import assert from "node:assert/strict";
import { test } from "node:test";

import { ApiError } from "../../../api/static/client.js";
import { chartable, readChoice, writeChoice } from "../../../api/static/pages/episode/charts.js";
import { elementsOf, isPerToken, isPieces, toNumber } from "../../../api/static/pages/episode/fields.js";
import { newestOnly, RowCache } from "../../../api/static/pages/episode/rows.js";
import { shade } from "../../../api/static/pages/episode/texts.js";
import { formatValue } from "../../../api/static/pages/episode/values.js";

/** A field of a summary. */
function field(name, shape, dtype = "float32") {
  return { name, shape, dtype, kind: shape.length ? "vector" : "scalar", type: `${dtype}[${shape}]` };
}

const FIELDS = [
  field("done", [], "bool"),
  field("state", [5]),
  field("angle", []),
  field("next.reward", []),
  field("grid", [2, 2]),
];

test("charts show scalars and vectors", () => {
  const texts = [{ ...field("text", [], "arrow"), kind: "text" }];
  assert.deepEqual(
    chartable([...FIELDS, ...texts]).map(({ name }) => name),
    ["done", "state", "angle", "next.reward"],
  );
});

test("rewards are drawn first, and flags not at all", () => {
  const choice = readChoice(null, chartable(FIELDS));
  assert.deepEqual(
    [...choice],
    [
      ["next.reward", [0]],
      ["angle", [0]],
      ["state", [0, 1, 2]],
    ],
  );
});

test("chosen fields and components are in the address", () => {
  const fields = chartable(FIELDS);
  const choice = readChoice("state:0.4.9,done,missing", fields);
  assert.deepEqual(
    [...choice],
    [
      ["state", [0, 4]],
      ["done", [0]],
    ],
  );
  assert.equal(writeChoice(choice, fields), "state:0.4,done");
  assert.equal(writeChoice(new Map(), fields), "none");
  assert.equal(readChoice("none", fields).size, 0);
});

test("fields of tokens are recognised by their types", () => {
  const typed = (type) => ({ ...field("x", [], "arrow"), type });
  assert.deepEqual(
    ["float32[?]", "list<double>", "list<string>", "string"].map((type) => isPerToken(typed(type))),
    [true, true, false, false],
  );
  assert.deepEqual(
    ["list<string>", "large_list<large_string>", "string"].map((type) => isPieces(typed(type))),
    [true, true, false],
  );
  assert.equal(elementsOf(field("grid", [2, 3])), 6);
});

test("numbers are read from values of one element", () => {
  assert.deepEqual([1, [2], true, "9007199254740993", "abc", [1, 2], null].map(toNumber), [
    1,
    2,
    1,
    9007199254740992,
    null,
    null,
    null,
  ]);
});

test("values are written out", () => {
  assert.equal(formatValue([1], { actions: ["left", "stay"] }), "stay (1)");
  assert.equal(formatValue(7, { actions: ["left"] }), "7");
  assert.deepEqual(
    [[true], null, { a: 1 }, 1 / 3].map((value) => formatValue(value, {})),
    ["true", "none", '{"a":1}', "0.3333"],
  );
  assert.equal(formatValue([1, "a"], {}), "[1, a]");
  assert.match(formatValue(Array(20).fill(0), {}), /, … 20 in all\]$/);
});

test("colours of tokens have two hues where there are both signs", () => {
  assert.match(shade(-1, -1, 2), /--series-2\) 24%/);
  assert.match(shade(2, -1, 2), /--series-1\) 48%/);
  assert.match(shade(3, 1, 3), /--series-1\) 48%/);
  assert.match(shade(-3, -3, -1), /--series-2\) 48%/);
  assert.match(shade(-1, -3, -1), /--series-2\) 0%/);
});

/** A cache of rows whose field `n` has the number of the step. */
function rowsOf(count, { missing = 0, most = Infinity } = {}) {
  const requests = [];
  const load = async (start, steps) => {
    requests.push([start, steps]);
    assert.ok(requests.length < 20, "the rows are asked for again and again");
    if (steps > most) throw new ApiError(413, {});
    const gone = Math.max(0, Math.min(steps, missing - start));
    const values = Array.from({ length: steps - gone }, (_, at) => start + gone + at);
    return { missing: gone, columns: { n: values } };
  };
  return { rows: new RowCache({ load, count: () => count }), requests };
}

test("rows are fetched in windows", async () => {
  const { rows, requests } = rowsOf(100);
  assert.deepEqual(await rows.get(3), { n: 3 });
  assert.deepEqual(await rows.get(63), { n: 63 });
  assert.deepEqual(await rows.get(99), { n: 99 });
  assert.deepEqual(requests, [
    [0, 64],
    [64, 36],
  ]);
});

test("eight windows are kept", async () => {
  const { rows, requests } = rowsOf(1000);
  for (let window = 0; window < 9; window += 1) await rows.get(64 * window);
  await rows.get(64);
  assert.equal(requests.length, 9);
  await rows.get(0);
  assert.equal(requests.length, 10);
});

test("a row that has left the store is null", async () => {
  const { rows } = rowsOf(100, { missing: 10 });
  assert.deepEqual([await rows.get(9), await rows.get(10)], [null, { n: 10 }]);
});

test("fewer rows are asked for where they do not fit into an answer", async () => {
  const { rows, requests } = rowsOf(100, { most: 10 });
  assert.deepEqual(await rows.get(50), { n: 50 });
  assert.deepEqual(requests, [
    [0, 64],
    [48, 16],
    [48, 4],
  ]);
});

test("a row that fits into no answer is an error", async () => {
  const { rows } = rowsOf(100, { most: 0 });
  await assert.rejects(rows.get(0), { status: 413 });
});

test("of the steps that arrive during a request only the newest is drawn", async () => {
  const drawn = [];
  const waiting = [];
  const show = newestOnly(
    async (step) => {
      await new Promise((done) => waiting.push(done));
      return () => drawn.push(step);
    },
    () => {},
  );
  for (const step of [1, 2, 3]) show(step);
  while (waiting.length) {
    waiting.shift()();
    await new Promise((done) => setImmediate(done));
  }
  assert.deepEqual(drawn, [1, 3]);
});

test("an error is shown, and the next step is loaded all the same", async () => {
  const errors = [];
  const drawn = [];
  const show = newestOnly(
    async (step) => {
      if (step === 1) throw new Error("gone");
      return () => drawn.push(step);
    },
    (error) => errors.push(error.message),
  );
  show(1);
  show(2);
  await new Promise((done) => setImmediate(done));
  assert.deepEqual([errors, drawn], [["gone"], [2]]);
});
