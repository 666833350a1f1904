import assert from "node:assert/strict";
import { test } from "node:test";

import { shorten } from "../../../api/static/format.js";
import { groupCondition, nameOf, rangeCondition, readSmoothing, smooth, toLines } from "../../../api/static/series.js";

/** A group of episodes: one value for each x. */
function group(name, x, mean, more = {}) {
  return {
    name,
    other: false,
    x,
    mean,
    min: mean.map((value) => value - 1),
    max: mean.map((value) => value + 1),
    p10: mean.map((value) => value - 1),
    median: mean,
    p90: mean.map((value) => value + 1),
    count: mean.map(() => 1),
    ...more,
  };
}

test("smoothing has no bias towards 0 at the beginning", () => {
  assert.deepEqual(
    smooth([5, 5, 5], 0.9).map((value) => value.toFixed(6)),
    ["5.000000", "5.000000", "5.000000"],
  );
  const [first, second] = smooth([0, 10], 0.5);
  assert.equal(first, 0);
  assert.equal(second, 20 / 3);
});

test("smoothing keeps missing values, and weight 0 keeps all values", () => {
  assert.deepEqual(smooth([1, null, 1], 0.5), [1, null, 1]);
  const values = [3, 1];
  assert.equal(smooth(values, 0), values);
});

test("a weight in an address is limited to the slider", () => {
  assert.deepEqual([null, "", "0.5", "-1", "7", "x"].map(readSmoothing), [0.6, 0.6, 0.5, 0, 0.98, 0.6]);
});

test("lines of several groups share one x axis", () => {
  const { x, series } = toLines([group("b", [2, 4], [20, 40]), group("a", [1, 2], [1, 2])], 0);
  assert.deepEqual(x, [1, 2, 4]);
  assert.deepEqual(
    series.map(({ label, values }) => [label, values]),
    [
      ["a", [1, 2, null]],
      ["b", [null, 20, 40]],
    ],
  );
  assert.ok(series.every((line) => line.low === undefined));
});

test("few groups have bands where bins have several episodes", () => {
  const count = [10, 10];
  const { series } = toLines([group(null, [1, 2], [5, 6], { count })], 0);
  assert.deepEqual([series[0].label, series[0].low, series[0].high], ["none", [4, 5], [6, 7]]);
  const many = [..."abcde"].map((name) => group(name, [1, 2], [5, 6], { count }));
  assert.ok(toLines(many, 0).series.every((line) => line.low === undefined));
});

test("lines are medians or means", () => {
  const one = group("a", [1], [5], { median: [4] });
  assert.deepEqual(
    ["median", "mean"].map((line) => toLines([one], 0, line).series[0].values),
    [[4], [5]],
  );
});

test("groups are ordered by their numbers, and the rest comes last", () => {
  const names = ["worker-10", "worker-9"].map((name) => group(name, [1], [1]));
  const { series } = toLines([group(null, [1], [1], { other: true }), ...names], 0);
  assert.deepEqual(
    series.map(({ label }) => label),
    ["worker-9", "worker-10", "others"],
  );
});

test("conditions select the range of an axis", () => {
  assert.equal(rangeCondition("episode", 1.2, 4.8), "episode_id BETWEEN 2 AND 4");
  assert.match(rangeCondition("rows", 10, 20), /last_id BETWEEN 10 AND 20/);
  assert.match(rangeCondition("time", 1000, 2000), /make_timestamp\(1000000\) AND make_timestamp\(2000999\)/);
});

test("conditions select a group, whatever its name", () => {
  assert.equal(groupCondition("none", null), null);
  assert.equal(groupCondition("source", "it's"), "source = 'it''s'");
  assert.equal(groupCondition("info.a/b~c", "1"), "json_extract_string(info, '/a~1b~0c') = '1'");
  assert.equal(groupCondition("info.level", null), "json_extract_string(info, '/level') IS NULL");
  assert.match(groupCondition("session", "s1"), /WHERE session = 's1'/);
  const cut = "é".repeat(200);
  assert.equal(groupCondition("source", cut), `starts_with(source, '${cut}')`);
});

test("names are shortened", () => {
  assert.equal(shorten("abc", 3), "abc");
  assert.equal(shorten("abcd", 3), "ab…");
  assert.equal(nameOf({ name: null, other: true }), "others");
});
