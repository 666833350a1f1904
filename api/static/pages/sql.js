// @ts-check
/** Ask a store in SQL: an editor with completion, the result as a table and a plot, and downloads. */

import { storeHref } from "../addresses.js";
import { download, getJson, isLongInteger, readJson, request, storePath } from "../client.js";
import { lineChart, paletteColour } from "../chart.js";
import { complete } from "../completion.js";
import { announce, emptyState, errorState, h, replace } from "../dom.js";
import { duration, integer, number, toMilliseconds } from "../format.js";
import { isNumeric, isTime, table } from "../table.js";

const ARROW = "application/vnd.apache.arrow.stream";
/** Rows that the page asks for; downloads have all that the server gives. */
const MOST_ROWS = 10_000;
/** Rows of the table; more make the page slow. */
const TABLE_ROWS = 1000;
/** Longest text of a cell. */
const MOST_LETTERS = 300;
/** Most groups of a plot; more numbers are put into ranges. */
const MOST_GROUPS = 8;
const RANGES = 5;
/** Columns that hold ids of episodes. */
const EPISODE_COLUMNS = new Set(["episode_id", "_episode"]);
/** @type {[string, string][]} */
const EXAMPLES = [
  [
    "Episodes with the lowest return",
    'SELECT episode_id, source, length, "return", status\nFROM episodes\nWHERE status <> \'open\'\nORDER BY "return"\nLIMIT 20',
  ],
  [
    "Return and length of every source",
    'SELECT source, count(*) AS episodes, avg("return") AS mean_return, avg(length) AS mean_length\nFROM episodes\nGROUP BY source\nORDER BY mean_return DESC',
  ],
  ["The newest rows", "SELECT _id, _episode, _step, _time, _priority\nFROM transitions\nORDER BY _id DESC\nLIMIT 100"],
  [
    "Facts of the episodes",
    "SELECT episode_id, length, info\nFROM episodes\nWHERE info IS NOT NULL\nORDER BY episode_id DESC\nLIMIT 100",
  ],
];

/** @typedef {{columns: string[], rows: any[][]}} Table */
/** @typedef {{x: number, y: number, group: any}} Point */

/** @param {Record<string, string>} params */
export function title(params) {
  return `SQL · ${params.store}`;
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, context) {
  const { params, query, setQuery, signal, server } = context;
  const { store } = params;
  if (!server.sql) {
    replace(
      root,
      h("h1", null, "SQL"),
      emptyState(
        "This server does not answer SQL.",
        "It was started with --no-sql. ",
        h("code", null, "expstore sql"),
        " on the server's machine runs queries all the same.",
      ),
    );
    return;
  }
  const { relations } = await getJson(storePath(store, "/relations"), { signal });
  const editor = h("textarea.editor", {
    id: "query",
    rows: "7",
    spellcheck: "false",
    autocapitalize: "off",
    autocomplete: "off",
    value: query.get("q") ?? "",
    maxlength: "16384",
    "aria-describedby": "query-hint",
    placeholder: "SELECT ...",
    keydown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      run();
    },
  });
  const start = h("button.primary", { type: "button", click: () => run(), title: "Ctrl+Enter" }, "Run");
  const stop = h("button", { type: "button", hidden: true, click: () => running.abort() }, "Cancel");
  const state = h("p.soft", { role: "status" });
  const result = h("div.column");
  let running = new AbortController();
  complete(editor, relations, signal);

  replace(
    root,
    h("h1", null, "SQL"),
    h(
      "div.episode",
      null,
      h(
        "div.column",
        null,
        h(
          "div.editor-box",
          null,
          h("label", { for: "query" }, "Query"),
          editor,
          h(
            "div.row",
            null,
            start,
            stop,
            h(
              "span.hint",
              { id: "query-hint" },
              "Ctrl+Enter runs. Ctrl+Space completes names: Tab or Enter accepts, Escape closes the list.",
            ),
            state,
          ),
        ),
        result,
      ),
      drawRelations(relations, (text) => insert(editor, text)),
    ),
  );

  const drawExamples = () =>
    replace(
      result,
      emptyState(
        "Nothing was asked yet.",
        "One SELECT statement of DuckDB over the relations of this store. For instance:",
      ),
      h(
        "ul.examples",
        null,
        EXAMPLES.map(([name, text]) =>
          h(
            "li",
            null,
            h(
              "button.link",
              {
                type: "button",
                click: () => {
                  editor.value = text;
                  run();
                },
              },
              name,
            ),
          ),
        ),
      ),
    );

  async function run() {
    const text = editor.value.trim();
    if (!text) {
      setQuery({ q: "", x: "", y: "", colour: "" });
      drawExamples();
      return;
    }
    running.abort();
    running = new AbortController();
    const mine = running;
    setQuery({ q: text }, { push: text !== (query.get("q") ?? "") });
    query.set("q", text);
    stop.hidden = false;
    state.textContent = "Running…";
    const began = performance.now();
    try {
      const response = await request(storePath(store, "/sql"), {
        method: "POST",
        body: { query: text, limit: MOST_ROWS },
        signal: AbortSignal.any([signal, mine.signal]),
      });
      const truncated = response.headers.get("X-Truncated") === "true";
      const found = /** @type {Table} */ (await readJson(response));
      const seconds = (performance.now() - began) / 1000;
      state.textContent = `${integer(found.rows.length)} ${found.rows.length === 1 ? "row" : "rows"}${truncated ? ", cut" : ""} in ${duration(seconds)}`;
      drawResult(result, context, text, found, truncated);
      announce(state.textContent ?? "");
    } catch (error) {
      if (signal.aborted || mine !== running) return;
      if (mine.signal.aborted) state.textContent = "Cancelled";
      else {
        state.textContent = "";
        replace(result, errorState(error, true));
      }
    } finally {
      if (mine === running) stop.hidden = true;
    }
  }

  if (editor.value.trim()) await run();
  else drawExamples();
}

/** @param {HTMLTextAreaElement} editor @param {string} text */
function insert(editor, text) {
  const { selectionStart: from, selectionEnd: to, value } = editor;
  const space = from > 0 && !/[\s(,.]/.test(value[from - 1]) ? " " : "";
  editor.setRangeText(space + text, from, to, "end");
  editor.focus();
}

/** Relations and their columns, to look up and to insert. */
function drawRelations(
  /** @type {import("../completion.js").Relation[]} */ relations,
  /** @type {(text: string) => void} */ act,
) {
  return h(
    "section.card.side",
    { "aria-labelledby": "relations-title" },
    h("h2", { id: "relations-title" }, "Relations"),
    relations.map((relation) =>
      h(
        "details.relation",
        null,
        h(
          "summary",
          null,
          h("span.mono", null, relation.name),
          h("span.soft", null, ` ${relation.columns.length} columns`),
        ),
        relation.description ? h("p.hint", null, relation.description) : null,
        h(
          "p",
          null,
          h("button.link.mono", { type: "button", click: () => act(relation.name) }, `insert ${relation.name}`),
        ),
        h(
          "ul.columns",
          null,
          relation.columns.map((column) =>
            h(
              "li",
              null,
              h(
                "button.link.mono",
                { type: "button", title: `Insert ${column.sql}`, click: () => act(column.sql) },
                h("bdi", null, column.name),
              ),
              h(
                "span.soft",
                { title: column.type },
                ` ${column.type.length > 40 ? `${column.type.slice(0, 39)}…` : column.type}`,
              ),
              column.description ? h("span.hint.description", null, column.description) : null,
            ),
          ),
        ),
      ),
    ),
  );
}

/**
 * @param {HTMLElement} place
 * @param {import("../app.js").Context} context
 * @param {string} text The query.
 * @param {Table} found
 * @param {boolean} truncated
 */
function drawResult(place, context, text, found, truncated) {
  const { params, signal } = context;
  const trouble = h("div", { role: "alert" });
  const save = async (/** @type {() => Promise<void>} */ act) => {
    replace(trouble);
    try {
      await act();
    } catch (error) {
      if (!signal.aborted) replace(trouble, errorState(error));
    }
  };
  const ask = (/** @type {string} */ accept) =>
    request(storePath(params.store, "/sql"), { method: "POST", body: { query: text }, accept, signal });
  const saveCsv = () =>
    save(async () => {
      // The page has only the first rows of a long result.
      const all = truncated ? await readJson(await ask("application/json")) : found;
      download(`${params.store}.csv`, toCsv(all), "text/csv;charset=utf-8");
    });
  const saveArrow = () =>
    save(async () => download(`${params.store}.arrows`, await (await ask(ARROW)).arrayBuffer(), ARROW));
  replace(
    place,
    truncated
      ? h(
          "p.warning",
          { role: "note" },
          `The result was cut: the first ${integer(found.rows.length)} rows are here. Add LIMIT or a condition; a download has as many rows as the server gives.`,
        )
      : null,
    h(
      "div.row",
      null,
      h("button", { type: "button", click: saveCsv }, "Download CSV"),
      h("button", { type: "button", click: saveArrow }, "Download Arrow"),
    ),
    trouble,
    found.rows.length === 0
      ? emptyState("The query has no rows.")
      : [drawPlot(context, found), drawTable(params.store, found)],
  );
}

/** @param {string} store @param {Table} found */
function drawTable(store, { columns, rows }) {
  const rest = rows.length - TABLE_ROWS;
  const draw = (/** @type {any} */ value, /** @type {number} */ at) => {
    if (value === null) return h("span.soft", null, "NULL");
    if (EPISODE_COLUMNS.has(columns[at]) && Number.isInteger(value))
      return h("a", { href: storeHref(store, `/episodes/${value}`) }, value);
    const text = typeof value === "object" ? JSON.stringify(value) : String(value);
    return text.length > MOST_LETTERS ? `${text.slice(0, MOST_LETTERS - 1)}…` : text;
  };
  const made = table({
    label: "Result",
    rows: rows.slice(0, TABLE_ROWS),
    columns: columns.map((name, at) => ({
      key: String(at),
      title: h("bdi", null, name.slice(0, 200)),
      isNumber: isNumeric(rows, at),
      draw: (row) => draw(row[at], at),
    })),
  });
  made.classList.add("tall");
  return [
    made,
    rest > 0
      ? h(
          "p.soft",
          null,
          `The table has the first ${integer(TABLE_ROWS)} of ${integer(rows.length)} rows; the plot and the downloads have all of them.`,
        )
      : null,
  ];
}

/** A plot of two columns, coloured by a third one. */
function drawPlot(
  /** @type {import("../app.js").Context} */ { query, setQuery, signal },
  /** @type {Table} */ { columns, rows },
) {
  const places = columns.map((_, at) => at);
  const numbers = places.filter((at) => isNumeric(rows, at));
  const times = places.filter((at) => isTime(rows, at));
  const axes = places.filter((at) => numbers.includes(at) || times.includes(at));
  if (numbers.length === 0 || axes.length < 2) return null;
  const find = (/** @type {string} */ name, /** @type {number[]} */ among) =>
    among.find((at) => columns[at] === query.get(name));
  const choose = (
    /** @type {string} */ label,
    /** @type {string} */ name,
    /** @type {number[]} */ among,
    /** @type {string} */ none,
  ) => {
    const list = h(
      "select",
      {
        change: () => {
          query.set(name, list.value === "" ? "" : columns[Number(list.value)]);
          setQuery({ [name]: query.get(name) });
          draw();
        },
      },
      h("option", { value: "" }, none),
      among.map((at) => h("option", { value: String(at) }, columns[at].slice(0, 60))),
    );
    const chosen = find(name, among);
    list.value = chosen === undefined ? "" : String(chosen);
    return { list, label: h("label.row", null, label, list) };
  };
  const x = choose("Plot", "x", axes, "no plot");
  const y = choose("against", "y", numbers, "choose");
  const colour = choose("coloured by", "colour", places, "nothing");
  const canvas = h("div");
  let end = new AbortController();
  const draw = () => {
    end.abort();
    end = new AbortController();
    replace(canvas);
    if (x.list.value === "" || y.list.value === "") return;
    const at = {
      x: Number(x.list.value),
      y: Number(y.list.value),
      colour: colour.list.value === "" ? null : Number(colour.list.value),
    };
    const timed = !numbers.includes(at.x);
    const value = (/** @type {any[]} */ row, /** @type {number} */ place) =>
      numbers.includes(place) && row[place] !== null ? Number(row[place]) : row[place];
    const points = rows
      .filter((row) => row[at.x] !== null && row[at.y] !== null)
      .map((row) => ({
        x: timed ? toMilliseconds(row[at.x]) : value(row, at.x),
        y: value(row, at.y),
        group: at.colour === null ? null : value(row, at.colour),
      }))
      .sort((a, b) => a.x - b.x);
    const groups = groupsOf(points, columns[at.y]);
    // Lines connect values of one place each; several at one place are points.
    const lines = groups.every(({ members }) =>
      members.every((point, number) => number === 0 || point.x > members[number - 1].x),
    );
    const xs = lines ? [...new Set(points.map((point) => point.x))] : points.map((point) => point.x);
    const series = groups.map(({ name, members }, number) => {
      if (!lines) {
        const own = new Set(members);
        return {
          label: name,
          colour: () => paletteColour(number),
          values: points.map((point) => (own.has(point) ? point.y : null)),
        };
      }
      const byX = new Map(members.map((point) => [point.x, point.y]));
      return { label: name, colour: () => paletteColour(number), values: xs.map((value) => byX.get(value) ?? null) };
    });
    lineChart(canvas, {
      title: `${columns[at.y]} against ${columns[at.x]}`,
      x: xs,
      series,
      xLabel: columns[at.x].slice(0, 60),
      yLabel: columns[at.y].slice(0, 60),
      isTime: timed,
      height: 280,
      points: !lines || xs.length < 200,
      lines,
      signal: AbortSignal.any([signal, end.signal]),
    });
  };
  draw();
  return h("section.card", { "aria-label": "Plot" }, h("div.row", null, x.label, y.label, colour.label), canvas);
}

/**
 * Groups of points by their third value; many different numbers become ranges with equally many points.
 *
 * @param {Point[]} points
 * @param {string} name Of the only group, if there is no third column.
 * @returns {{name: string, members: Point[]}[]}
 */
export function groupsOf(points, name) {
  const texts = new Map(points.map(({ group }) => [JSON.stringify(group), group]));
  const values = [...texts.values()];
  if (texts.size > MOST_GROUPS && values.every((value) => typeof value === "number" || value === null)) {
    const sorted = points
      .map(({ group }) => group)
      .filter((value) => value !== null)
      .sort((a, b) => a - b);
    const edges = [
      ...new Set(
        Array.from(
          { length: RANGES + 1 },
          (_, part) => sorted[Math.min(sorted.length - 1, Math.floor((part * sorted.length) / RANGES))],
        ),
      ),
    ];
    return edges.slice(0, -1).map((low, part) => {
      const last = part === edges.length - 2;
      return {
        name: `${number(low)} to ${number(edges[part + 1])}`,
        members: points.filter(({ group }) => group !== null && group >= low && (last || group < edges[part + 1])),
      };
    });
  }
  /** @type {Map<string, Point[]>} */
  const byText = new Map();
  for (const point of points) {
    const key = JSON.stringify(point.group);
    const members = byText.get(key);
    if (members) members.push(point);
    else byText.set(key, [point]);
  }
  const ranked = [...byText].sort(([, a], [, b]) => b.length - a.length);
  const label = (/** @type {string} */ key) =>
    texts.size === 1 && texts.has("null") ? name : String(texts.get(key) ?? "NULL").slice(0, 60);
  const kept = ranked.slice(0, MOST_GROUPS - 1).map(([key, members]) => ({ name: label(key), members }));
  const others = ranked.slice(MOST_GROUPS - 1);
  if (others.length === 1) kept.push({ name: label(others[0][0]), members: others[0][1] });
  if (others.length > 1)
    kept.push({
      name: `${integer(others.length)} others`,
      members: others.flatMap(([, members]) => members).sort((a, b) => a.x - b.x),
    });
  return kept;
}

/**
 * A table as CSV (RFC 4180). NULL is an empty field, and the empty text is "".
 *
 * @param {Table} table
 */
export function toCsv({ columns, rows }) {
  const field = (/** @type {any} */ value) => {
    if (value === null) return "";
    const text = typeof value === "object" ? JSON.stringify(value) : String(value);
    return text === "" || /[",\r\n]|^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows].map((row) => `${row.map(field).join(",")}\r\n`).join("");
}
