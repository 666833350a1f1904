import assert from "node:assert/strict";
import { test } from "node:test";

import { candidates, wordBefore } from "../../../api/static/completion.js";

const RELATIONS = [
  {
    name: "transitions",
    columns: [
      { name: "_id", sql: "_id", type: "BIGINT" },
      { name: "next.reward", sql: "next.reward", type: "FLOAT" },
      { name: "odd - field", sql: '"odd - field"', type: "BIGINT" },
    ],
  },
  { name: "episodes", columns: [{ name: "return", sql: '"return"', type: "DOUBLE" }] },
];

/** The texts of the candidates for the end of a query. */
function complete(text) {
  return candidates(text, wordBefore(text, text.length), RELATIONS).map((candidate) => candidate.text);
}

test("a word has letters, digits, dots and quotes", () => {
  assert.equal(wordBefore("SELECT next.rew FROM", 15), "next.rew");
  assert.equal(wordBefore('SELECT "odd', 11), '"odd');
  assert.equal(wordBefore("SELECT ", 7), "");
});

test("names that begin with the word come before names that contain it", () => {
  const found = complete("SELECT re");
  assert.deepEqual(found.slice(0, 2), ['"return"', "next.reward"]);
  assert.deepEqual(complete("SELECT next.rew"), ["next.reward"]);
});

test("only columns of the relations in the query are offered", () => {
  assert.ok(!complete("FROM episodes WHERE re").includes("next.reward"));
  assert.ok(complete("FROM EPISODES WHERE re").includes('"return"'));
  assert.ok(!complete("FROM episodes WHERE _i").includes("_id"));
  assert.ok(complete("FROM episodes2 WHERE _i").includes("_id")); // names no relation, so all columns are offered
});

test("relations and keywords are offered, too", () => {
  assert.deepEqual(complete("SELECT 1 FROM tr"), ["transitions"]);
  assert.ok(complete("sel").includes("SELECT"));
});

test("a word that is complete is not offered, and there are twelve names at most", () => {
  assert.ok(!complete("SELECT transitions").includes("transitions"));
  assert.equal(complete("").length, 12);
});

test("quotes do not matter", () => {
  assert.deepEqual(complete('SELECT "odd'), ['"odd - field"']);
  assert.deepEqual(complete("SELECT odd"), ['"odd - field"']);
});
