// @ts-check
/** Selections: create one of the episodes that match a filter, include and exclude an episode. */

import { readJson, request, storePath } from "./client.js";
import { announce, errorState, h, replace } from "./dom.js";
import { conditionOf, literal } from "./episode_data.js";

/** Remembers who changes selections, in this browser. */
const BY = "expstore-by";

/** @param {string} label @param {Record<string, any>} properties */
function field(label, properties) {
  const input = h("input", { autocomplete: "off", maxlength: "200", ...properties });
  return { input, element: h("label.field", null, label, input) };
}

function byField() {
  const by = field("Who", { value: localStorage.getItem(BY) ?? "", required: true });
  by.input.addEventListener("change", () => localStorage.setItem(BY, by.input.value));
  return by;
}

/**
 * A form that saves the episodes of a filter as a selection.
 *
 * @param {import("./app.js").Context} context
 * @param {() => import("./episode_data.js").Filter} filter
 */
export function drawSaving({ params, signal }, filter) {
  const name = field("Name", { required: true, placeholder: "clean-v1" });
  const reason = field("Reason", { maxlength: "1000" });
  const by = byField();
  const result = h("div", { role: "status" });
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const body = {
      name: name.input.value,
      where: conditionOf(filter()) || "true",
      reason: reason.input.value,
      by: by.input.value,
    };
    try {
      const response = await request(storePath(params.store, "/selections"), { method: "POST", body, signal });
      const { episodes } = await readJson(response);
      const use = h("code", null, `selection(${literal(body.name)})`);
      replace(result, h("p", null, `Saved ${episodes} episodes that have ended. Use them by `, use, "."));
    } catch (error) {
      if (!signal.aborted) replace(result, errorState(error));
    }
  };
  const button = h("button", { type: "submit" }, "Save");
  const form = h("form.row", { submit }, name.element, reason.element, by.element, button);
  return h("details.saving", null, h("summary", null, "Save as selection"), form, result);
}

/**
 * The selections of an episode; with write access a form that includes and excludes it.
 *
 * @param {import("./app.js").Context} context
 * @param {import("./episode_data.js").Episode} episode
 */
export function drawSelections({ params, server, signal }, episode) {
  const members = new Set(episode.selections ?? []);
  const excluded = new Set(Object.keys(episode.marks?.excluded ?? {}));
  const list = h("div.row");
  const trouble = h("div", { role: "status" });
  const draw = () =>
    replace(
      list,
      [...members].map((name) => h("span.chip", null, name)),
      [...excluded].map((name) => h("span.chip", { title: "Excluded by hand" }, h("s", null, name))),
      members.size + excluded.size ? null : h("p.soft", null, "In no selection."),
    );
  draw();
  const title = h("h2", { id: "selections-title" }, "Selections");
  const card = h("section.card", { "aria-labelledby": "selections-title" }, title, list, trouble);
  if (server.access !== "write" || !server.sql) return card;
  const reason = field("Reason", { required: true, maxlength: "1000" });
  const by = byField();
  const choice = h("select", { required: true, "aria-label": "Selection" });
  const submit = async (/** @type {any} */ event) => {
    event.preventDefault();
    const act = event.submitter?.value ?? "exclude";
    const name = choice.value;
    const body = { name, episodes: [episode.episode_id], reason: reason.input.value, by: by.input.value };
    replace(trouble);
    try {
      await request(storePath(params.store, `/selections/${act}`), { method: "POST", body, signal });
      (act === "include" ? excluded : members).delete(name);
      (act === "include" ? members : excluded).add(name);
      announce(`${act === "include" ? "Included in" : "Excluded from"} ${name}`);
      draw();
    } catch (error) {
      if (!signal.aborted) replace(trouble, errorState(error));
    }
  };
  const button = (/** @type {string} */ act, /** @type {string} */ text) =>
    h("button", { type: "submit", value: act }, text);
  const buttons = h("div.row", null, button("exclude", "Exclude"), button("include", "Include"));
  const form = h("form.column", { submit, hidden: true }, choice, reason.element, by.element, buttons);
  card.append(form);
  const query = { query: "SELECT name FROM selections ORDER BY name" };
  request(storePath(params.store, "/sql"), { method: "POST", body: query, signal })
    .then(readJson)
    .then(({ rows }) => {
      replace(
        choice,
        rows.map((/** @type {string[]} */ [name]) => h("option", { value: name }, name)),
      );
      form.hidden = rows.length === 0;
    })
    .catch((error) => {
      if (!signal.aborted) replace(trouble, errorState(error));
    });
  return card;
}
