// @ts-check
/** Complete names of relations and columns in a text area, from a list under the cursor. */

import { announce, h, replace } from "./dom.js";

/** @typedef {{name: string, sql: string, type: string, description?: string}} Column `sql` is its name as SQL writes it. */
/** @typedef {{name: string, description?: string, columns: Column[]}} Relation */
/** @typedef {{text: string, note: string}} Candidate */

/** Most entries of the list. */
const MOST = 12;
const KEYWORDS = [
  "SELECT",
  "FROM",
  "WHERE",
  "GROUP BY",
  "ORDER BY",
  "LIMIT",
  "HAVING",
  "JOIN",
  "USING",
  "DISTINCT",
  "BETWEEN",
  "CASE",
  "WHEN",
  "THEN",
  "ELSE",
  "END",
  "count(*)",
  "avg(",
  "sum(",
  "min(",
  "max(",
  "median(",
  "quantile_cont(",
  "DESC",
  "NULLS LAST",
  "IS NOT NULL",
];

/**
 * The word before a position, of letters that names may have.
 *
 * @param {string} text
 * @param {number} position
 */
export function wordBefore(text, position) {
  return /** @type {RegExpExecArray} */ (/[\w.$"]*$/.exec(text.slice(0, position)))[0];
}

/** @param {string} text @param {Relation[]} relations @returns {Relation[]} The relations that a query names. */
function relationsIn(text, relations) {
  return relations.filter((relation) => new RegExp(`\\b${relation.name.replace(/[^\w]/g, "\\$&")}\\b`, "i").test(text));
}

/**
 * Names that may continue a word: first those that begin with it, then those that contain it.
 *
 * @param {string} text The whole query.
 * @param {string} word
 * @param {Relation[]} relations
 * @returns {Candidate[]}
 */
export function candidates(text, word, relations) {
  const named = relationsIn(text, relations);
  /** @type {Map<string, Candidate>} */
  const all = new Map();
  const add = (/** @type {string} */ name, /** @type {string} */ note) => {
    if (!all.has(name)) all.set(name, { text: name, note });
  };
  for (const relation of named)
    for (const column of relation.columns) add(column.sql, `${relation.name} · ${column.type}`);
  for (const relation of relations) add(relation.name, "relation");
  if (named.length === 0)
    for (const relation of relations)
      for (const column of relation.columns) add(column.sql, `${relation.name} · ${column.type}`);
  for (const keyword of KEYWORDS) add(keyword, "SQL");
  const plain = word.replaceAll('"', "").toLowerCase();
  const rank = (/** @type {Candidate} */ { text: name }) => {
    const at = name.replaceAll('"', "").toLowerCase().indexOf(plain);
    return at === 0 ? 0 : at > 0 ? 1 : 2;
  };
  const found = [...all.values()].filter((candidate) => candidate.text !== word && rank(candidate) < 2);
  return found.sort((a, b) => rank(a) - rank(b)).slice(0, MOST);
}

/**
 * Show a list of names while the reader types. Tab or Enter accepts, the arrow keys choose, Escape closes, and
 * Ctrl+Space opens it. The text area keeps the focus; the list is announced through `aria-activedescendant`.
 *
 * @param {HTMLTextAreaElement} editor
 * @param {Relation[]} relations
 * @param {AbortSignal} signal
 */
export function complete(editor, relations, signal) {
  const list = h("ul.completion", { id: "completion", role: "listbox", "aria-label": "Names", hidden: true });
  document.body.append(list);
  signal.addEventListener("abort", () => list.remove(), { once: true });
  editor.setAttribute("aria-autocomplete", "list");
  editor.setAttribute("aria-controls", list.id);
  editor.setAttribute("aria-haspopup", "listbox");
  /** @type {Candidate[]} */
  let found = [];
  let chosen = 0;

  const close = () => {
    list.hidden = true;
    editor.removeAttribute("aria-activedescendant");
  };
  const mark = () => {
    [...list.children].forEach((entry, number) => entry.setAttribute("aria-selected", String(number === chosen)));
    editor.setAttribute("aria-activedescendant", `completion-${chosen}`);
    list.children[chosen]?.scrollIntoView({ block: "nearest" });
  };
  const open = (/** @type {boolean} */ always) => {
    const word = wordBefore(editor.value, editor.selectionStart);
    found = word || always ? candidates(editor.value, word, relations) : [];
    const whole =
      found.length > 0 &&
      [...relations.flatMap((relation) => [relation.name, ...relation.columns.map((column) => column.sql)])].includes(
        word,
      );
    if (found.length === 0 || (whole && !always) || editor.selectionStart !== editor.selectionEnd) {
      close();
      return;
    }
    chosen = 0;
    replace(
      list,
      found.map((candidate, number) =>
        h(
          "li",
          {
            id: `completion-${number}`,
            role: "option",
            "aria-selected": "false",
            mousedown: (/** @type {Event} */ event) => {
              event.preventDefault();
              chosen = number;
              accept();
            },
          },
          h("bdi.mono", null, candidate.text.slice(0, 80)),
          h("span.soft", null, candidate.note.slice(0, 60)),
        ),
      ),
    );
    if (list.hidden) announce(`${found.length} names`);
    list.hidden = false;
    place(list, editor);
    mark();
  };
  const accept = () => {
    const word = wordBefore(editor.value, editor.selectionStart);
    const at = editor.selectionStart;
    editor.setRangeText(found[chosen].text, at - word.length, at, "end");
    close();
  };

  const listen = (
    /** @type {string} */ name,
    /** @type {(event: any) => void} */ act,
    /** @type {EventTarget} */ target = editor,
  ) => target.addEventListener(name, act, { signal });
  listen("input", () => open(false));
  listen("blur", close);
  listen("click", close);
  listen("scroll", close);
  listen("scroll", close, window);
  listen("resize", close, window);
  listen("keydown", (event) => {
    if (event.key === " " && event.ctrlKey) {
      event.preventDefault();
      open(true);
      return;
    }
    if (list.hidden) return;
    if (event.key === "Escape") close();
    else if ((event.key === "Enter" && !event.ctrlKey && !event.metaKey) || (event.key === "Tab" && !event.shiftKey))
      accept();
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      chosen = (chosen + (event.key === "ArrowDown" ? 1 : -1) + found.length) % found.length;
      mark();
    } else {
      if (["ArrowLeft", "ArrowRight", "Home", "End", "Enter", "Tab"].includes(event.key)) close();
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  });
}

/** What decides where the letters of a text area are. */
const COPIED_STYLES = [
  "font-family",
  "font-size",
  "line-height",
  "letter-spacing",
  "padding",
  "border",
  "box-sizing",
  "tab-size",
];

/** Put the list under the cursor of the text area, which a copy of its text measures. */
function place(/** @type {HTMLElement} */ list, /** @type {HTMLTextAreaElement} */ editor) {
  const style = getComputedStyle(editor);
  const mark = h("span", null, "\u200b");
  const copy = h("div", null, editor.value.slice(0, editor.selectionStart), mark);
  for (const name of COPIED_STYLES) copy.style.setProperty(name, style.getPropertyValue(name));
  Object.assign(copy.style, {
    position: "absolute",
    visibility: "hidden",
    whiteSpace: "pre-wrap",
    overflowWrap: "break-word",
    width: `${editor.clientWidth}px`,
    top: "0",
    left: "0",
  });
  document.body.append(copy);
  const box = editor.getBoundingClientRect();
  const left = box.left + mark.offsetLeft - editor.scrollLeft;
  const top = box.top + mark.offsetTop + mark.offsetHeight - editor.scrollTop;
  copy.remove();
  list.style.left = `${Math.max(4, Math.min(left, document.documentElement.clientWidth - list.offsetWidth - 4))}px`;
  list.style.top = `${Math.min(top, box.bottom) + 2}px`;
}
