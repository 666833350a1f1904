#!/bin/sh
# A store served over HTTP, used with curl alone: make it, add rows, draw a batch, ask in SQL.
# Start the server first:  expstore serve runs     Then:  sh examples/http_curl.sh http://127.0.0.1:8420
set -eu
url="${1:-http://127.0.0.1:8420}/v1/stores/curl"
json="Content-Type: application/json"

curl -sSf -X PUT "$url" -H "$json" -d '{
  "capacity": 1000,
  "fields": {"observation": ["float32", [2]], "action": "int64", "next.reward": ["float32", [1]], "next.done": ["bool", [1]]}
}'; echo

# One list per column, a value per row; all rows are taken in or none.
curl -sSf "$url/extend?source=curl" -H "$json" -d '{
  "observation": [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]],
  "action": [0, 1, 0],
  "next.reward": [1.0, 0.5, 0.0],
  "next.done": [false, false, true]
}'; echo

# The same draw of the same seed is the same batch, for whoever asks.
curl -sSf "$url/sample" -H "$json" -d '{"batch_size": 2, "seed": 7, "draw": 0}'; echo

curl -sSf "$url/sql" -H "$json" -d '{"query": "SELECT action, avg(next.reward) AS reward FROM transitions GROUP BY action ORDER BY action"}'; echo
curl -sSf "$url/episodes"; echo
