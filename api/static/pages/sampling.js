// @ts-check
/** What a sampler would draw: ages, priorities, episodes and sources of its rows. Nothing in the store changes. */

import { getJson, request, storePath } from "../client.js";
import { areGrowing, lineChart, paletteColour } from "../chart.js";
import { announce, emptyState, errorState, h, replace } from "../dom.js";
import { coloursOf, swatch } from "../facets.js";
import { duration, integer, number } from "../format.js";
import { bar, facts, table } from "../table.js";

const BATCH_SIZE = 256;
const BATCHES = 20;
/** Values at the start of parameters that have no default but are needed. @type {Record<string, any>} */
const STARTS = { slice_len: 16 };
/** Parameters of samplers in the address begin with this. */
const PREFIX = "s.";

/**
 * A kind of sampler, as the server's OpenAPI document describes it.
 *
 * @typedef {object} Kind
 * @property {string} name
 * @property {string} description
 * @property {Parameter[]} parameters
 */
/**
 * @typedef {object} Parameter
 * @property {string} name
 * @property {string} description
 * @property {"integer" | "number" | "boolean" | "choice"} type
 * @property {string[]} choices
 * @property {any} start What the form has at first; null: nothing.
 * @property {boolean} required
 */

/** @param {Record<string, string>} params */
export function title(params) {
  return `Sampling · ${params.store}`;
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, context) {
  const { params, query, setQuery, signal } = context;
  const { store } = params;
  const [description, summary] = await Promise.all([
    getJson("openapi.json", { signal }),
    getJson(storePath(store, "/summary"), { signal }),
  ]);
  if (summary.rows === 0) {
    replace(
      root,
      h("h1", null, "Sampling"),
      emptyState(
        "There is nothing to sample yet.",
        "Rows appear when a program writes some, for instance with ",
        h("code", null, "rb.extend"),
        ".",
      ),
    );
    return;
  }
  const kinds = kindsOf(description);
  const kind = h(
    "select",
    {
      id: "kind",
      "aria-describedby": "kind-hint",
      change: () => {
        drawParameters();
        run();
      },
    },
    kinds.map((each) => h("option", { value: each.name }, each.name.replaceAll("_", " "))),
  );
  kind.value = kinds.some((each) => each.name === query.get("kind")) ? query.get("kind") : kinds[0].name;
  const hint = h("p.hint", { id: "kind-hint" });
  const parameters = h("div.row.controls");
  const where = h("input.mono", {
    value: query.get("where") ?? "",
    placeholder: "next.reward > 0.5",
    maxlength: "1000",
    autocomplete: "off",
    spellcheck: "false",
  });
  const size = h("input", {
    type: "number",
    min: "1",
    max: "100000",
    required: true,
    value: query.get("batch_size") ?? String(BATCH_SIZE),
  });
  const batches = h("input", {
    type: "number",
    min: "1",
    max: "1000",
    required: true,
    value: query.get("batches") ?? String(BATCHES),
  });
  const state = h("p.soft", { role: "status" });
  const result = h("div.column");
  /** @type {Map<string, {parameter: Parameter, input: any}>} */
  const inputs = new Map();
  const form = h(
    "form.card",
    {
      submit: (/** @type {Event} */ event) => {
        event.preventDefault();
        run();
      },
    },
    h(
      "div.row.controls",
      null,
      h("label.field", null, "Sampler", kind),
      h("label.field.grow", null, "Only rows where", where),
      h("label.field", null, "Batch size", size),
      h("label.field", null, "Batches", batches),
    ),
    hint,
    parameters,
    h("div.row", null, h("button.primary", { type: "submit" }, "Draw"), state),
  );
  replace(
    root,
    h(
      "div.heading",
      null,
      h("h1", null, "Sampling"),
      h("p.soft", null, "Draws batches as this sampler would. The store, its counts and its samplers do not change."),
    ),
    form,
    result,
  );

  function drawParameters() {
    const found = /** @type {Kind} */ (kinds.find((each) => each.name === kind.value));
    hint.textContent = found.description;
    inputs.clear();
    replace(
      parameters,
      found.parameters.map((parameter, place) => {
        const id = `parameter-${place}`;
        const asked = query.get(PREFIX + parameter.name);
        const about = { id, "aria-describedby": `${id}-hint`, title: parameter.description };
        const value = asked ?? parameter.start;
        const input =
          parameter.type === "boolean"
            ? h("input", { ...about, type: "checkbox", checked: String(value) === "true" })
            : parameter.type === "choice"
              ? h(
                  "select",
                  about,
                  parameter.choices.map((each) => h("option", { value: each, selected: each === value }, each)),
                )
              : h("input", {
                  ...about,
                  type: "number",
                  step: parameter.type === "integer" ? "1" : "any",
                  required: parameter.required,
                  value: value ?? "",
                });
        inputs.set(parameter.name, { parameter, input });
        const name = parameter.name.replaceAll("_", " ");
        return h(
          "div.field.parameter",
          null,
          parameter.type === "boolean" ? h("label.tick", null, input, name) : [h("label", { for: id }, name), input],
          h("span.hint", { id: `${id}-hint` }, parameter.description),
        );
      }),
    );
    parameters.hidden = found.parameters.length === 0;
  }

  /** The sampler of the form, and what its address says. */
  function readForm() {
    /** @type {Record<string, any>} */
    const sampler = { kind: kind.value };
    /** @type {Record<string, any>} */
    const address = {
      kind: kind.value === kinds[0].name ? "" : kind.value,
      where: where.value.trim(),
      batch_size: Number(size.value) === BATCH_SIZE ? "" : size.value,
      batches: Number(batches.value) === BATCHES ? "" : batches.value,
    };
    for (const name of query.keys()) if (name.startsWith(PREFIX)) address[name] = "";
    for (const [name, { parameter, input }] of inputs) {
      if (parameter.type === "boolean") sampler[name] = input.checked;
      else if (parameter.type === "choice") sampler[name] = input.value;
      else if (input.value !== "") sampler[name] = Number(input.value);
      const value = sampler[name];
      address[PREFIX + name] = value === undefined || value === parameter.start ? "" : String(value);
    }
    return { sampler, address };
  }

  let attempt = new AbortController();
  async function run() {
    if (!form.checkValidity()) {
      state.textContent = "Fill in the sampler's parameters.";
      return;
    }
    attempt.abort();
    attempt = new AbortController();
    const both = AbortSignal.any([signal, attempt.signal]);
    const { sampler, address } = readForm();
    setQuery(address);
    for (const [name, value] of Object.entries(address)) query.set(name, value);
    state.textContent = "Drawing…";
    try {
      const response = await request(storePath(store, "/sample/preview"), {
        method: "POST",
        signal: both,
        body: {
          sampler,
          where: where.value.trim() || null,
          batch_size: Number(size.value),
          batches: Number(batches.value),
        },
      });
      const found = await response.json();
      state.textContent = `${integer(found.rows)} rows drawn in ${duration(found.seconds)}`;
      announce(state.textContent);
      drawResult(result, found, summary, Boolean(where.value.trim()), await coloursOf(store, "source"), both);
    } catch (error) {
      if (both.aborted) return;
      state.textContent = "";
      replace(result, errorState(error, true));
    }
  }

  drawParameters();
  await run();
}

/**
 * @param {HTMLElement} place
 * @param {any} found
 * @param {any} summary
 * @param {boolean} selects Whether the sampler has a condition.
 * @param {import("../facets.js").Colours} colours Of the sources.
 * @param {AbortSignal} signal
 */
function drawResult(place, found, summary, selects, colours, signal) {
  const { episodes, sources, weights } = found;
  const ages = h("div");
  const priorities = h("div");
  const share = (/** @type {number} */ value) => `${(100 * value).toFixed(1)} %`;
  const shareBar = (/** @type {number} */ value) => h("span.row.share", null, bar(value, 1), share(value));
  replace(
    place,
    h(
      "div.card",
      null,
      facts([
        ["Rows drawn", integer(found.rows)],
        [
          selects ? "Rows that match" : "Rows to draw from",
          found.matching === null
            ? `all ${integer(summary.rows)}`
            : `${integer(found.matching)} of ${integer(summary.rows)}`,
        ],
        [
          "Episodes drawn from",
          `${integer(episodes.drawn)} of ${integer(episodes.of)}${episodes.of ? ` (${share(episodes.drawn / episodes.of)})` : ""}`,
        ],
        [
          "Weights",
          weights === null ? "none: all rows count equally" : `${number(weights.min)} to ${number(weights.max)}`,
        ],
      ]),
    ),
    h(
      "div.grid",
      null,
      h(
        "section.card",
        { "aria-labelledby": "ages-title" },
        h("h2", { id: "ages-title" }, "Ages of the rows drawn"),
        ages,
      ),
      h(
        "section.card",
        { "aria-labelledby": "priorities-title" },
        h("h2", { id: "priorities-title" }, "Their priorities"),
        priorities,
      ),
    ),
    h(
      "section.card",
      { "aria-labelledby": "sources-title" },
      h("h2", { id: "sources-title" }, "Sources"),
      sources.length
        ? table({
            label: "Shares of the sources",
            rows: sources,
            columns: [
              {
                key: "name",
                title: "Source",
                draw: (row) => [swatch(colours(row.name)), " ", h("bdi", null, String(row.name).slice(0, 200))],
              },
              { key: "share_drawn", title: "Of the rows drawn", draw: (row) => shareBar(row.share_drawn) },
              { key: "share_stored", title: "Of the rows stored", draw: (row) => shareBar(row.share_stored) },
              {
                key: "ratio",
                title: "Drawn / stored",
                isNumber: true,
                draw: (row) => (row.share_stored ? `${number(row.share_drawn / row.share_stored)}×` : "none stored"),
              },
            ],
          })
        : h("p.soft", null, "No rows were drawn."),
    ),
  );
  if (found.ages) compare(ages, "Ages of the rows drawn and of those stored", "age", found.ages, signal);
  else replace(ages, h("p.soft", null, "No rows were drawn."));
  if (found.priorities)
    compare(priorities, "Priorities of the rows drawn and of those stored", "priority", found.priorities, signal);
  else replace(priorities, h("p.soft", null, "This store has no priorities. They appear after rb.update_priority."));
}

/** The shares of rows drawn and of rows stored in the same bins. */
function compare(
  /** @type {HTMLElement} */ place,
  /** @type {string} */ title,
  /** @type {string} */ xLabel,
  /** @type {{edges: number[], counts: number[], stored: number[]}} */ { edges, counts, stored },
  /** @type {AbortSignal} */ signal,
) {
  const shares = (/** @type {number[]} */ values) => {
    const total = values.reduce((sum, value) => sum + value, 0) || 1;
    return values.map((value) => (100 * value) / total);
  };
  lineChart(place, {
    title,
    xLabel,
    yLabel: "% of rows",
    x: counts.map((_, at) => (edges[at] + edges[at + 1]) / 2),
    isLog: areGrowing(edges),
    isDuration: xLabel === "age",
    height: 200,
    signal,
    series: [
      { label: "drawn", values: shares(counts), steps: true, colour: () => paletteColour(0) },
      { label: "stored", values: shares(stored), steps: true, colour: () => paletteColour(1) },
    ],
  });
}

/**
 * Kinds of samplers that a preview takes.
 *
 * @param {any} document The server's OpenAPI document.
 * @returns {Kind[]}
 */
export function kindsOf(document) {
  const resolve = (/** @type {any} */ schema) =>
    schema?.$ref
      ? schema.$ref
          .slice(2)
          .split("/")
          .reduce((/** @type {any} */ at, /** @type {string} */ part) => at[part], document)
      : schema;
  const body = resolve(
    document.paths["/v1/stores/{name}/sample/preview"].post.requestBody.content["application/json"].schema,
  );
  /** @type {Kind[]} */
  const kinds = [];
  const collect = (/** @type {any} */ schema) => {
    const found = resolve(schema);
    for (const part of [...(found.oneOf ?? []), ...(found.anyOf ?? []), ...(found.allOf ?? [])]) collect(part);
    const name = found.properties?.kind?.const;
    if (name && !kinds.some((each) => each.name === name)) {
      const parameters = Object.entries(found.properties)
        .filter(([key]) => key !== "kind")
        .map(([key, value]) => parameterOf(key, value, (found.required ?? []).includes(key)));
      kinds.push({ name, description: found.description ?? "", parameters });
    }
  };
  collect(body.properties.sampler);
  return kinds;
}

/** @param {string} name @param {any} schema @param {boolean} required @returns {Parameter} */
function parameterOf(name, schema, required) {
  const own = schema.anyOf?.find((/** @type {any} */ each) => each.type !== "null") ?? schema;
  return {
    name,
    description: (schema.description ?? "").replaceAll("`", ""),
    type: own.enum ? "choice" : own.type,
    choices: own.enum ?? [],
    start: schema.default ?? STARTS[name] ?? null,
    required,
  };
}
