import assert from "node:assert/strict";
import { test } from "node:test";

import { findMessages, parseMessage, Thread } from "../../../api/static/pages/episode/messages.js";

const text = (value) => JSON.stringify(value);
const kinds = (message) => message.parts.map(({ kind, title, text }) => [kind, title, text]);

test("calls, results and thoughts of both interfaces are parts of the same kinds", () => {
  const names = new Map();
  const call = { id: "t1", type: "function", function: { name: "add", arguments: '{"a":2}' } };
  const chat = [
    { role: "assistant", content: "so", reasoning_content: "hm", tool_calls: [call] },
    { role: "tool", tool_call_id: "t1", content: "4" },
  ].map((one) => parseMessage(text(one), names));
  const items = [
    { type: "reasoning", summary: [{ type: "summary_text", text: "hm" }] },
    { type: "message", role: "assistant", content: [{ type: "output_text", text: "so" }] },
    { type: "function_call", call_id: "t2", name: "add", arguments: '{"a":2}' },
    { type: "function_call_output", call_id: "t2", output: "4" },
  ].map((one) => parseMessage(text(one), names));
  const expected = [
    ["thought", "reasoning", "hm"],
    ["text", "", "so"],
    ["call", "add", '{\n  "a": 2\n}'],
    ["result", "add", "4"],
  ];
  assert.deepEqual(chat.flatMap(kinds), expected);
  assert.deepEqual(items.flatMap(kinds), expected);
  assert.deepEqual([...chat, ...items].map(({ role }) => role), ["assistant", "tool", "assistant", "assistant", "assistant", "tool"]); // prettier-ignore
});

test("any JSON and any text is a message, and nothing that it says is lost", () => {
  const values = [null, true, 1.5, "", "mark-7", [], {}, { a: "mark-7" }, [{ type: "text", text: "mark-7" }]];
  const names = ["role", "content", "tool_calls", "type", "function", "name", "arguments", "output", "summary"];
  for (const name of names) {
    for (const value of values) {
      for (const role of ["user", "tool", "assistant", undefined]) {
        for (const type of ["message", "function_call", "reasoning", "function_call_output", undefined]) {
          const said = { role, type, content: "c", [name]: value };
          assert.equal(typeof parseMessage(text(said)).role, "string");
          for (const part of parseMessage(text(said)).parts) assert.equal(typeof part.text, "string");
        }
      }
    }
  }
  for (const plain of ["mark-7", '{"role": mark-7', text(["mark-7"]), text("mark-7")])
    assert.match(text(parseMessage(plain)), /mark-7/);
  for (const other of [
    { role: "user", custom: "mark-7" },
    { type: "computer_call", action: "mark-7" },
    { x: "mark-7" },
  ])
    assert.match(text(parseMessage(text(other))), /mark-7/);
  assert.deepEqual(parseMessage(null).parts, []);
});

test("a picture is named, not written out", () => {
  const url = `data:image/png;base64,${"A".repeat(10_000)}`;
  const [part] = parseMessage(text({ role: "user", content: [{ type: "image_url", image_url: { url } }] })).parts;
  assert.equal(part.title, "image_url");
  assert.match(part.text, /^data:image\/png, \d+ characters$/);
});

test("only what is new is said, and forks are named", () => {
  const thread = new Thread();
  const relation = (step, like, shared, count) =>
    thread.add({ step, like, shared, messages: Array(count).fill('{"role":"user","content":"x"}') }).relation;
  assert.equal(relation(0, null, 0, 3), "");
  assert.equal(relation(1, 0, 3, 2), "");
  assert.equal(relation(2, null, 0, 0), "", "a reward has no messages");
  assert.equal(relation(3, 1, 5, 2), "");
  assert.equal(relation(4, 1, 5, 1), "Continues step 1");
  assert.equal(relation(5, 4, 2, 1), "A fork of step 4 after 2 of its 6 messages");
  assert.equal(relation(6, null, 0, 2), "A new conversation");
});

test("messages are lists of texts with this name", () => {
  const field = (name, type) => ({ name, type, kind: "other", dtype: "arrow", shape: [] });
  const found = findMessages([field("messages", "string"), field("tools", "list<string>"), field("next.messages", "continued list<string>")]); // prettier-ignore
  assert.equal(found.name, "next.messages");
  assert.equal(findMessages([field("messages", "list<int64>")]), null);
});
