// A served store from JavaScript: rows in, a batch out, a question in SQL.
// Start the server first:  expstore serve runs     Then:  node examples/http_fetch.mjs http://127.0.0.1:8420
const url = `${process.argv[2] ?? "http://127.0.0.1:8420"}/v1/stores/fetch`;

async function call(path, body, method = "POST") {
  const answer = await fetch(`${url}${path}`, {
    method,
    headers: { "Content-Type": "application/json", Accept: "application/json" },
    body: JSON.stringify(body),
  });
  const told = await answer.json();
  if (!answer.ok) throw new Error(`${told.error.kind}: ${told.error.message}; ${told.error.hint}`);
  return told;
}

await call("", { fields: { position: ["float32", [2]], clicks: "int32", "next.reward": ["float32", [1]] } }, "PUT");
const written = await call("/extend", {
  position: [[0, 1], [2, 3], [4, 5]],
  clicks: [1, 0, 2],
  "next.reward": [0.5, 0, 1],
});
console.log(`rows ${written.first_id} to ${written.first_id + written.count - 1}`);
const { rows } = await call("/sample", { batch_size: 4, seed: 1, draw: 0 });
console.log(`clicks of a batch: ${rows.clicks.join(" ")}`);
const { rows: [[total]] } = await call("/sql", { query: "SELECT sum(clicks) FROM transitions" });
console.log(`clicks in all: ${total}`);
