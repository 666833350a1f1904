// @ts-check
/** Facts about an episode; with write access a form. */

import { announce, errorState, h, linked, replace } from "../../dom.js";
import { changeFacts, formatFact, parseFact } from "../../episode_data.js";

/** @param {import("../../app.js").Context} context @param {import("../../episode_data.js").Episode} episode */
export function drawFacts({ params, server, signal }, episode) {
  const body = h("div.column");
  const trouble = h("div", { role: "status" });
  const change = async (/** @type {Record<string, any>} */ changes, /** @type {string} */ done) => {
    replace(trouble);
    try {
      episode.info = await changeFacts(params.store, episode.episode_id, changes, signal);
      announce(done);
      draw();
    } catch (error) {
      if (!signal.aborted) replace(trouble, errorState(error));
    }
  };
  const draw = () => {
    if (server.access !== "write") {
      replace(body, drawList(episode.info));
      return;
    }
    // A change redraws the form: the reader stays in the field to which Tab led.
    const focused = body.contains(document.activeElement) ? document.activeElement?.id : null;
    replace(body, drawForm(episode.info, change));
    if (focused) document.getElementById(focused)?.focus();
  };
  draw();
  const title = h("h2", { id: "facts-title" }, "Facts");
  return h("section.card", { "aria-labelledby": "facts-title" }, title, body, trouble);
}

/** @param {Record<string, any>} info */
function drawList(info) {
  const entries = Object.entries(info);
  if (entries.length === 0) {
    return h(
      "p.soft",
      null,
      "Nothing was noted about this episode. A server that takes writes can add facts here; programs do it with " +
        "rb.episodes.annotate.",
    );
  }
  return h(
    "dl.pairs",
    null,
    entries.map(([name, value]) => [
      h("dt", null, name),
      h("dd", null, typeof value === "string" ? linked(value) : formatFact(value)),
    ]),
  );
}

/**
 * @param {Record<string, any>} info
 * @param {(changes: Record<string, any>, done: string) => void} change Writes facts; `done` is announced.
 */
function drawForm(info, change) {
  const flag = h("input", {
    type: "checkbox",
    id: "fact-flag",
    checked: info.flag === true,
    change: () => change({ flag: flag.checked || null }, flag.checked ? "Flag set" : "Flag removed"),
  });
  const note = h("textarea", {
    id: "fact-note",
    rows: "2",
    placeholder: "What is notable about this episode",
    value: formatNote(info.note),
    change: () => change({ note: note.value.trim() || null }, "Note saved"),
  });
  const others = Object.entries(info).filter(([name]) => name !== "flag" && name !== "note");
  return [
    h("label.tick", null, flag, "Flagged"),
    h("label.field", null, "Note", note),
    others.map(([name, value], place) => drawFact(`fact-${place}`, name, value, change)),
    drawNewFact(change),
    h(
      "p.hint",
      { id: "fact-hint" },
      "Values are JSON (12, true, [1, 2]) or text. A change is saved when you leave its field.",
    ),
  ];
}

/**
 * @param {string} id
 * @param {string} name
 * @param {any} value
 * @param {(changes: Record<string, any>, done: string) => void} change
 */
function drawFact(id, name, value, change) {
  const input = h("input.grow", {
    id,
    value: formatFact(value),
    autocomplete: "off",
    change: () => change({ [name]: parseFact(input.value) }, `${name} saved`),
  });
  const remove = h(
    "button",
    {
      type: "button",
      "aria-label": `Remove ${name}`,
      title: "Remove",
      click: () => change({ [name]: null }, `${name} removed`),
    },
    "×",
  );
  return h("div.fact", null, h("label", { for: id, title: name }, name), h("div.row", null, input, remove));
}

/** @param {(changes: Record<string, any>, done: string) => void} change */
function drawNewFact(change) {
  const name = h("input", { id: "fact-name", required: true, maxlength: "200", autocomplete: "off" });
  const value = h("input", {
    id: "fact-value",
    required: true,
    autocomplete: "off",
    "aria-describedby": "fact-hint",
  });
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    change({ [name.value]: parseFact(value.value) }, `${name.value} added`);
  };
  return h(
    "form.row.fact-new",
    { submit },
    h("label.field", null, "New fact", name),
    h("label.field.grow", null, "Value", value),
    h("button", { type: "submit" }, "Add"),
  );
}

/** @param {any} value */
function formatNote(value) {
  if (value === undefined || value === null) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}
