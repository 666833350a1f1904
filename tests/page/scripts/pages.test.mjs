import assert from "node:assert/strict";
import { test } from "node:test";

import { href, storeHref } from "../../../api/static/addresses.js";
import { numberValues } from "../../../api/static/facets.js";
import { toMilliseconds } from "../../../api/static/format.js";
import { decodeSafely, isLongInteger, parseJson } from "../../../api/static/client.js";
import { lastReturns } from "../../../api/static/pages/compare.js";
import { kindsOf } from "../../../api/static/pages/sampling.js";
import { groupsOf, toCsv } from "../../../api/static/pages/sql.js";
import { difference } from "../../../api/static/pages/pair.js";
import { describeAges } from "../../../api/static/pages/store.js";
import { around } from "../../../api/static/pages/store/curves.js";
import { sort } from "../../../api/static/pages/stores.js";

test("addresses encode names and leave out empty entries", () => {
  assert.equal(
    storeHref("a/b", "/episodes", { where: "x > 1", by: "", x: null }),
    "#/stores/a%2Fb/episodes?where=x+%3E+1",
  );
  assert.equal(href("/"), "#/");
  assert.deepEqual(["a%20b", "%zz"].map(decodeSafely), ["a b", "%zz"]);
});

const keepsDigits = parseJson("[9007199254740993]")[0] !== 9007199254740992;

test("integers keep all their digits", { skip: !keepsDigits && "this Node has no JSON.parse with sources" }, () => {
  assert.deepEqual(parseJson('[9007199254740993, 5, 1e300, "9007199254740993"]'), [
    "9007199254740993",
    5,
    1e300,
    "9007199254740993",
  ]);
});

test("a long integer is a text that a number would round", () => {
  assert.deepEqual(["9007199254740993", "-9007199254740993", "9007199254740991", "abc", 5].map(isLongInteger), [
    true,
    true,
    false,
    false,
    false,
  ]);
});

test("stores without a value come last in either order", () => {
  const rows = [{ name: "a", rows: 1 }, { name: "b" }, { name: "c", rows: 3 }];
  assert.deepEqual(
    sort(rows, "rows").map(({ name }) => name),
    ["a", "c", "b"],
  );
  assert.deepEqual(
    sort(rows, "-rows").map(({ name }) => name),
    ["c", "a", "b"],
  );
});

test("the last tenth of the returns is weighted by its episodes", () => {
  const groups = [
    { x: [1, 3], mean: [9, 1], count: [1, 3] },
    { x: [2], mean: [null], count: [5] },
  ];
  assert.deepEqual(lastReturns(groups), { mean: 1, best: 9 });
  assert.deepEqual(lastReturns([]), { mean: null, best: null });
  const many = [{ x: [...Array(20).keys()], mean: [...Array(20).keys()], count: [...Array(19).fill(1), 3] }];
  assert.equal(lastReturns(many).mean, (18 + 3 * 19) / 4);
});

test("values have their colours by the order in which they came", () => {
  const values = [
    { value: "b", count: 9, first: 4 },
    { value: "a", count: 2, first: 1 },
  ];
  const colours = numberValues(values);
  assert.deepEqual(["a", "b", null].map(colours), [0, 1, 7]);
  assert.deepEqual(["a", "b"].map(numberValues([...values, { value: "c", count: 99, first: 6 }])), [0, 1]);
  assert.equal(colours("new"), colours("new"));
});

test("the ages of rows are said in time and in rows", () => {
  assert.equal(
    describeAges({ edges: [60, 120, 7200], counts: [3, 1] }, 1000),
    "The newest row was written 1 min ago, the oldest 2 h ago. Half of the rows are at most 2 min old, or 500 rows.",
  );
});

test("differences of values are numbers, counts or words", () => {
  assert.deepEqual(
    [
      difference(1, 1),
      difference(1, [3.5]),
      difference(1, 3, true),
      difference([1, 2], [1, 3]),
      difference([1], [1, 2]),
      difference("a", "b"),
    ],
    ["", "+2.5", "differs", "1 of 2 values", "differs", "differs"],
  );
});

test("a click chooses the range around the nearest value", () => {
  assert.deepEqual(around([10, 20, 40], 22), [15, 30]);
  assert.deepEqual(around([10], 999), [10, 10]);
});

test("a table is saved as CSV", () => {
  const rows = [
    [null, "", 1],
    ['a"b', "c,d", { e: 1 }],
    [" f", "g\nh", true],
  ];
  assert.equal(
    toCsv({ columns: ["x", "y", "z"], rows }),
    'x,y,z\r\n,"",1\r\n"a""b","c,d","{""e"":1}"\r\n" f","g\nh",true\r\n',
  );
});

test("times of SQL are UTC unless they have a zone", () => {
  assert.equal(toMilliseconds("2026-01-02 03:04:05"), Date.UTC(2026, 0, 2, 3, 4, 5));
  assert.equal(toMilliseconds("2026-01-02T03:04:05+01:00"), Date.UTC(2026, 0, 2, 2, 4, 5));
});

test("points without a third column are one group", () => {
  const points = [1, 2].map((x) => ({ x, y: x, group: null }));
  assert.deepEqual(groupsOf(points, "return"), [{ name: "return", members: points }]);
});

test("many numbers become ranges with as many points each", () => {
  const points = Array.from({ length: 100 }, (_, at) => ({ x: at, y: at, group: at }));
  const groups = groupsOf(points, "y");
  assert.deepEqual(
    groups.map(({ members }) => members.length),
    [20, 20, 20, 20, 20],
  );
  assert.equal(groups[0].name, "0 to 20");
});

test("the smallest of many texts are one group, in the order of x", () => {
  const points = Array.from({ length: 40 }, (_, at) => ({ x: 40 - at, y: 0, group: `g${at % 10}` }));
  const groups = groupsOf(points, "y");
  assert.equal(groups.length, 8);
  assert.equal(groups[7].name, "3 others");
  const xs = groups[7].members.map(({ x }) => x);
  assert.deepEqual(
    xs,
    [...xs].sort((one, other) => one - other),
  );
});

test("samplers are read from the server's description", () => {
  const slices = {
    description: "Slices.",
    required: ["slice_len"],
    properties: {
      kind: { const: "slices" },
      slice_len: { type: "integer", description: "Steps of `a` slice." },
      ends: { anyOf: [{ type: "null" }, { type: "string", enum: ["pad", "cut"] }], default: "pad" },
    },
  };
  const sampler = { oneOf: [{ $ref: "#/components/schemas/Slices" }, { properties: { kind: { const: "random" } } }] };
  const schema = { properties: { sampler } };
  const kinds = kindsOf({
    components: { schemas: { Slices: slices } },
    paths: {
      "/v1/stores/{name}/sample/preview": { post: { requestBody: { content: { "application/json": { schema } } } } },
    },
  });
  assert.deepEqual(
    kinds.map(({ name }) => name),
    ["slices", "random"],
  );
  assert.deepEqual(kinds[0].parameters, [
    { name: "slice_len", description: "Steps of a slice.", type: "integer", choices: [], start: 16, required: true },
    { name: "ends", description: "", type: "choice", choices: ["pad", "cut"], start: "pad", required: false },
  ]);
});
