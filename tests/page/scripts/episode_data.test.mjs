import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import {
  conditionOf,
  episodesOf,
  formatFact,
  hasFilter,
  identifier,
  literal,
  neighbourOf,
  parseFact,
  readFilter,
  writeFilter,
} from "../../../api/static/episode_data.js";

const NONE = { where: "", source: "", status: "", split: "", since: "", until: "", facts: {}, order: "" };
const original = globalThis.fetch;

globalThis.sessionStorage = { getItem: () => null };
afterEach(() => {
  globalThis.fetch = original;
});

/** Answer requests with episodes; return the parameters of each request. */
function serve(...answers) {
  const queries = [];
  globalThis.fetch = async (address) => {
    queries.push(Object.fromEntries(address.searchParams));
    const rows = answers.shift().map((id) => [id]);
    return new Response(JSON.stringify({ columns: ["episode_id"], rows }), { status: 200 });
  };
  return queries;
}

test("a filter is written into the address and read from it", () => {
  const filter = {
    where: "length > 3",
    source: "a",
    status: "cut",
    split: "eval",
    since: "1700000000000",
    until: "1800000000000",
    facts: { "a b": "1" },
    order: "-return",
  };
  assert.deepEqual(readFilter(new URLSearchParams(writeFilter(filter))), filter);
  assert.deepEqual(readFilter(new URLSearchParams()), NONE);
  assert.deepEqual(readFilter(new URLSearchParams("facts=[1]")).facts, {});
  assert.deepEqual(readFilter(new URLSearchParams("facts={")).facts, {});
});

test("an order is no filter", () => {
  assert.equal(hasFilter({ ...NONE, order: "length" }), false);
  for (const part of [{ where: "a" }, { source: "a" }, { split: "a" }, { since: "1" }, { facts: { a: "1" } }]) {
    assert.equal(hasFilter({ ...NONE, ...part }), true);
  }
});

test("texts and names are quoted in SQL", () => {
  assert.deepEqual([null, 1.5, true, "it's"].map(literal), ["NULL", "1.5", "true", "'it''s'"]);
  assert.equal(identifier('a"b'), '"a""b"');
});

test("conditions are joined, and a comment ends with its line", () => {
  assert.equal(conditionOf(NONE), "");
  assert.equal(conditionOf({ ...NONE, where: "a -- b" }), "a -- b");
  const both = conditionOf({ ...NONE, where: "a -- b", facts: { "x/y~z": "it's" } });
  assert.equal(both, "(a -- b\n) AND json_extract_string(info, '/x~1y~0z') = 'it''s'");
});

test("a fact that is a number is found in each of its texts", () => {
  const condition = conditionOf({ ...NONE, facts: { gamma: "1" } });
  assert.match(condition, /= '1' OR \(json_type\(info, '\/gamma'\) = 'DOUBLE' AND TRY_CAST\(/);
  assert.doesNotMatch(conditionOf({ ...NONE, facts: { gamma: "1;" } }), /TRY_CAST/);
});

test("rows become objects", () => {
  const [one, two] = episodesOf({
    columns: ["episode_id", "info"],
    rows: [
      [1, '{"a": 1, "_split": "eval", "_group": {"key": 1}, "_selections": {"members": {"clean": []}}}'],
      [2, null],
    ],
  });
  assert.deepEqual(one, { episode_id: 1, info: { a: 1 }, marks: { members: { clean: [] } } });
  assert.deepEqual(two.info, {});
});

test("a condition has the columns and the times of its filter", () => {
  const found = conditionOf({ ...NONE, source: "it's", where: "a = 1 OR b = 2 -- c" });
  assert.equal(found, "(a = 1 OR b = 2 -- c\n) AND source = 'it''s'");
  assert.equal(
    conditionOf({ ...NONE, split: "eval", since: "1500", until: "2500" }),
    "split = 'eval' AND end_time >= make_timestamp(1500000) AND end_time < make_timestamp(2500000)",
  );
  assert.equal(readFilter(new URLSearchParams("since=1)%20OR%20(1")).since, "");
});

test("facts are JSON where the text is JSON", () => {
  assert.deepEqual(["12", "true", "[1, 2]", '"1"', "two"].map(parseFact), [12, true, [1, 2], "1", "two"]);
});

test("a number that its conversion would change stays a text, and so does null", () => {
  for (const text of ["9007199254740993", "1e999", "null"]) assert.equal(parseFact(text), text);
});

test("the text of a fact is read as the same fact", () => {
  for (const value of [12, true, [1, 2], { a: null }, "two", "12", "true", '"', "", "null", "9007199254740993"]) {
    assert.deepEqual(parseFact(formatFact(value)), value);
  }
});

test("without a filter the neighbour is read by its id", async () => {
  const queries = serve([8], [3, 5]);
  const signal = new AbortController().signal;
  assert.equal(await neighbourOf("s", { episode_id: 6 }, NONE, 1, true, signal), 8);
  assert.equal(await neighbourOf("s", { episode_id: 6 }, NONE, -1, true, signal), 5);
  assert.deepEqual(queries, [
    { after: "6", limit: "1" },
    { after: "0", limit: "200" },
  ]);
});

test("under an order the neighbour is the next row of the list", async () => {
  const queries = serve([2], []);
  const signal = new AbortController().signal;
  const filter = { ...NONE, where: "a", order: "-return" };
  assert.equal(await neighbourOf("s", { episode_id: 6, return: 1 }, filter, 1, true, signal), 2);
  assert.equal(await neighbourOf("s", { episode_id: 6, return: null }, filter, -1, true, signal), null);
  const [down, up] = queries;
  assert.equal(down.order, "-return");
  assert.equal(down.where, '(a\n) AND ("return" < 1 OR ("return" = 1 AND "episode_id" < 6) OR "return" IS NULL)');
  assert.equal(up.order, "return");
  assert.equal(up.where, '(a\n) AND "return" IS NULL AND "episode_id" > 6');
});
