import assert from "node:assert/strict";
import { test } from "node:test";

import { marksOf, sentence } from "../../../api/static/changes.js";

const CHANGE = {
  kind: "drop",
  by: "source",
  where: "source = 'env-3' AND episode_id >= 325",
  since: new Date(2026, 10, 28, 14, 2, 30).getTime(),
  episode_id: 325,
  row_id: 81200,
  version: 12,
  episodes: 44,
  score: 31.5,
  reason: "source env-3: return 200 -> 35, length 74 -> 19 steps",
};

test("a change is said with its time and its row", () => {
  const end = "source env-3: return 200 -> 35, length 74 -> 19 steps";
  assert.equal(sentence(CHANGE), `since 2026-11-28 14:02 (row 81,200), ${end}`);
  assert.equal(sentence({ ...CHANGE, row_id: null }), `since 2026-11-28 14:02, ${end}`);
});

test("a mark is where the change begins on each axis", () => {
  const { since } = CHANGE;
  assert.deepEqual(marksOf([CHANGE]), [
    { kind: "drop", label: "source env-3", at: { episode: 325, rows: 81200, time: since, version: 12 } },
  ]);
  assert.equal(marksOf([{ ...CHANGE, reason: `source ${"x".repeat(99)}: y` }])[0].label.length, 30);
});
