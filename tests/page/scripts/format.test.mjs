import assert from "node:assert/strict";
import { test } from "node:test";

import { ago, bytes, cell, compact, distinct, duration, integer, number, time } from "../../../api/static/format.js";

test("a value that is missing is said to be unknown", () => {
  for (const format of [integer, compact, number, bytes, duration, time]) {
    assert.equal(format(null), "unknown");
    assert.equal(format(undefined), "unknown");
  }
  assert.equal(cell(null), "");
});

test("integers have separators, or a suffix", () => {
  assert.equal(integer(1234567), "1,234,567");
  assert.equal(integer(0), "0");
  assert.equal(compact(1234567), "1.2M");
  assert.equal(compact(999), "999");
});

test("measured numbers have four significant digits", () => {
  assert.deepEqual([1 / 3, -1 / 3, 12.3456, 1234.56].map(number), ["0.3333", "-0.3333", "12.35", "1235"]);
  assert.deepEqual([999_999, 1e6, 0.0005, 0].map(number), ["999,999", "1.00e+6", "5.00e-4", "0"]);
  assert.equal(number("9007199254740993"), "9007199254740993");
});

test("sizes are in powers of 1024", () => {
  assert.deepEqual([0, 1023, 1024, 1536, 100 * 1024, 1024 ** 2].map(bytes), [
    "0 B",
    "1023 B",
    "1.0 KiB",
    "1.5 KiB",
    "100 KiB",
    "1.0 MiB",
  ]);
  assert.equal(bytes(5 * 1024 ** 5), "5120 TiB");
});

test("durations have two units at most", () => {
  assert.deepEqual([0.0123, 2.34, 59, 61, 3660, 90_000].map(duration), [
    "12 ms",
    "2.3 s",
    "59 s",
    "1 min 1 s",
    "1 h 1 min",
    "1 d 1 h",
  ]);
});

test("a rest of a duration that is 0 is left out, and 60 s are a minute", () => {
  assert.deepEqual([60, 3600, 3599.6, 7200, 86_400].map(duration), ["1 min", "1 h", "1 h", "2 h", "1 d"]);
  assert.deepEqual([0.2, 59, 200, 90_000].map(ago), ["just now", "59 s ago", "3 min ago", "1 d ago"]);
});

test("ticks of an axis have one label each", () => {
  assert.deepEqual(distinct(["1", "1", "2", "1"]), ["1", "", "2", "1"]);
});

test("times without a zone are UTC", () => {
  assert.equal(time("2026-01-02 03:04:05"), time("2026-01-02T03:04:05Z"));
  assert.equal(time("2026-01-02T05:04:05+02:00"), time(Date.UTC(2026, 0, 2, 3, 4, 5)));
  assert.match(time(0), /^(1970-01-01|1969-12-31) \d\d:\d\d:00$/);
  assert.equal(time("no time"), "no time");
});

test("cells have all digits of a number, and long texts are cut", () => {
  assert.equal(cell(521227598), "521227598");
  assert.equal(cell({ a: [1] }), '{"a":[1]}');
  assert.equal(cell("x".repeat(200)).length, 200);
  assert.equal(cell("x".repeat(201)), `${"x".repeat(199)}…`);
});
