import assert from "node:assert/strict";
import { test } from "node:test";

import { areGrowing, histogramData, thin } from "../../../api/static/chart.js";

test("a short line is not thinned", () => {
  const x = [1, 2, 3];
  const columns = [[1, null, 3]];
  assert.deepEqual(thin(x, columns, 3), { x, columns });
});

test("a thinned line keeps the lowest and the highest value of each piece", () => {
  const x = Array.from({ length: 1000 }, (_, at) => at);
  const spike = x.map((at) => (at === 503 ? 100 : at === 504 ? -100 : 0));
  const found = thin(x, [spike, x.map(() => null)], 10);
  assert.equal(found.x.length, 10);
  assert.deepEqual(
    found.columns[0].filter((value) => value !== 0),
    [-100, 100],
  );
  assert.ok(found.columns[1].every((value) => value === null));
  assert.deepEqual([found.x[0], found.x.at(-1)], [0, 999]);
});

test("bins that grow have a logarithmic axis", () => {
  assert.equal(areGrowing([1, 2, 4, 8, 16, 1000]), true);
  assert.equal(areGrowing([1, 2, 3, 4]), false);
  assert.equal(areGrowing([0, 1, 1000]), false);
});

test("a bar is in the middle of its bin", () => {
  const { x, series } = histogramData([0, 2, 4], [5, 6]);
  assert.deepEqual(
    [x, series[0].values],
    [
      [1, 3],
      [5, 6],
    ],
  );
});
