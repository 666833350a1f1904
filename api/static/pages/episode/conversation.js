// @ts-check
/** An episode as a conversation: of each row the messages that no row before it has, and how its call went. */

import { getJson, storePath } from "../../client.js";
import { errorState, h, replace } from "../../dom.js";
import { duration, integer, number } from "../../format.js";
import { facts } from "../../table.js";
import { isPerToken, isPieces, toNumber } from "./fields.js";
import { findMessages, Thread } from "./messages.js";
import { loadColumns } from "./rows.js";
import { drawTokens } from "./texts.js";

/** @typedef {import("./fields.js").Field} Field */
/** @typedef {import("./messages.js").Part} Part */

/** Rows of a request. */
const ROWS = 256;
/** Characters of a text that are drawn before the reader asks for all, and of one that is folded at first. */
const MOST_LETTERS = 4000;
const FOLDED_LETTERS = 400;
/** Characters that the line of a folded part shows. */
const LINE_LETTERS = 120;
/** Fields of a row that say how a call went, if a store has them. */
const ABOUT = [
  "event", "outcome", "status", "error", "model", "finish_reason", "input_tokens", "output_tokens", "seconds",
  "retry", "policy_version", "next.reward", "next.terminated", "next.truncated",
]; // prettier-ignore
/** What outcomes of calls mean, for which there is no whole answer. */
const OUTCOMES = /** @type {Record<string, string>} */ ({
  unanswered: "Unanswered: the proxy was killed during the call",
  failed: "Failed: the upstream gave no answer",
  cut: "Cut: the upstream ended its answer early",
  left: "Left: the client closed the connection",
});

/**
 * Draw the conversation of an episode, and what its calls add up to.
 *
 * @param {import("../../app.js").Context} context
 * @param {import("../../episode_data.js").Episode} episode
 * @param {Field[]} fields
 */
export function drawConversation({ params, signal }, episode, fields) {
  const field = /** @type {Field} */ (findMessages(fields)).name;
  const pieces = fields.find((one) => isPieces(one) && one.name !== field)?.name;
  const scores = fields.filter((one) => isPerToken(one) && /float|double/.test(one.type));
  const score = (scores.find(({ name }) => /log_?probs?$/.test(name)) ?? scores[0])?.name;
  const known = new Set(fields.map(({ name }) => name));
  const names = ABOUT.filter((name) => known.has(name)).concat(pieces ? [pieces] : [], pieces && score ? [score] : []);
  const list = h("div.column", { role: "list", "aria-label": "Rows of the conversation" });
  const total = h("div");
  const trouble = h("div");
  const more = h("button", { type: "button", hidden: true, click: () => load() }, "Show the next rows");
  const element = h(
    "section.card.conversation",
    { "aria-labelledby": "chat-title" },
    h("h2", { id: "chat-title" }, "Conversation"),
    list,
    trouble,
    more,
  );
  const sums = new Sums();
  const thread = new Thread();
  let [start, isBusy] = [/** @type {number | null} */ (0), false];

  const load = async () => {
    if (isBusy || start === null) return;
    isBusy = true;
    replace(trouble);
    try {
      const path = storePath(params.store, `/episodes/${episode.episode_id}/messages`);
      const last = thread.last === null ? {} : { known: thread.last };
      const answer = await getJson(path, { query: { field, start, count: ROWS, ...last }, signal });
      const first = answer.rows[0]?.step ?? start;
      const count = (answer.rows.at(-1)?.step ?? first) - first + 1;
      const { missing, columns } = await loadColumns(params.store, episode.episode_id, names, first, count, signal);
      for (const turn of answer.rows) {
        const at = turn.step - first - missing;
        const row = Object.fromEntries(names.map((name) => [name, columns[name]?.[at] ?? null]));
        const { relation, messages } = thread.add(turn);
        sums.add(row);
        list.append(drawTurn(turn.step, relation, messages, row, pieces ? row[pieces] : null, score));
        start = turn.step + 1;
      }
      more.hidden = answer.next === null;
      replace(total, sums.draw());
    } catch (error) {
      if (!signal.aborted) replace(trouble, errorState(error));
    } finally {
      isBusy = false;
    }
  };
  const side = h("section.card", { "aria-labelledby": "calls-title" }, h("h2", { id: "calls-title" }, "Calls"), total);
  load();
  return {
    main: element,
    side,
    /** Show the rows that were added to the episode. */
    extend: () => (more.hidden ? load() : undefined),
  };
}

/** What the rows that are shown add up to. */
class Sums {
  constructor() {
    this.rows = 0;
    this.failed = 0;
    this.tokens = [0, 0];
    this.seconds = 0;
    this.models = new Set();
    this.versions = new Set();
  }

  /** @param {Record<string, any>} row */
  add(row) {
    if ((row.event ?? "call") !== "call") return;
    this.rows += 1;
    this.failed += Number(troubleOf(row) !== "");
    this.tokens = [
      this.tokens[0] + (toNumber(row.input_tokens) ?? 0),
      this.tokens[1] + (toNumber(row.output_tokens) ?? 0),
    ];
    this.seconds += toNumber(row.seconds) ?? 0;
    if (row.model) this.models.add(row.model);
    if (row.policy_version !== null) this.versions.add(row.policy_version);
  }

  draw() {
    const { rows, failed, tokens, seconds, models, versions } = this;
    /** @type {[string, any][]} */
    const pairs = [["Calls", integer(rows)]];
    if (failed) pairs.push(["Without a good answer", h("span.bad", null, integer(failed))]);
    if (models.size) pairs.push([models.size > 1 ? "Models" : "Model", [...models].join(", ")]);
    if (versions.size) pairs.push([versions.size > 1 ? "Policy versions" : "Policy version", [...versions].join(", ")]);
    if (tokens[0] + tokens[1]) pairs.push(["Tokens in", integer(tokens[0])], ["Tokens out", integer(tokens[1])]);
    if (seconds) pairs.push(["Time of calls", duration(seconds)]);
    return facts(pairs);
  }
}

/** @param {Record<string, any>} row @returns {string} Why the call has no good answer; "": it has one. */
function troubleOf({ outcome, status, error }) {
  const detail = error ? `: ${error}` : "";
  if (outcome && outcome !== "answered") return `${OUTCOMES[outcome] ?? outcome}${detail}`;
  return status >= 400 ? `Status ${status}${detail}` : "";
}

/**
 * @param {number} step
 * @param {string} relation
 * @param {import("./messages.js").Message[]} messages
 * @param {Record<string, any>} row
 * @param {any} tokens Texts of the tokens of the answer.
 * @param {string | undefined} score Name of the field with a number for each.
 */
function drawTurn(step, relation, messages, row, tokens, score) {
  const about = [];
  if (row.event && row.event !== "call") about.push(row.event);
  if (row.finish_reason) about.push(row.finish_reason);
  if (row.input_tokens || row.output_tokens)
    about.push(`${integer(row.input_tokens)} → ${integer(row.output_tokens)} tokens`);
  if (row.seconds !== null) about.push(duration(toNumber(row.seconds)));
  if (row.retry) about.push(`retry ${row.retry}`);
  const reward = toNumber(row["next.reward"]);
  const ends = toNumber(row["next.terminated"]) ? "terminated" : toNumber(row["next.truncated"]) ? "truncated" : "";
  const trouble = troubleOf(row);
  const answer = messages.at(-1)?.role === "assistant" && !trouble ? messages.length - 1 : -1;
  const hasTokens = Array.isArray(tokens) && tokens.length > 0;
  return h(
    "article.turn",
    { role: "listitem", "data-step": step },
    h(
      "p.turn-head",
      null,
      h("span", null, `Step ${step}`),
      about.map((text) => h("span", null, text)),
      reward ? h("span.reward", null, `reward ${number(reward)}`) : null,
      ends ? h(`span.badge.${ends}`, null, ends) : null,
    ),
    relation ? h("p.relation-note", null, `${relation}.`) : null,
    messages.map((message, at) =>
      drawMessage(message, at === answer && hasTokens ? () => drawTokens(tokens, score, row) : null),
    ),
    trouble ? h("p.error", { dir: "auto" }, foldText(trouble)) : null,
  );
}

/** @param {import("./messages.js").Message} message @param {(() => any) | null} drawColoured Draws its tokens. */
function drawMessage({ role, parts }, drawColoured) {
  const kind = ["system", "developer", "user", "assistant", "tool"].includes(role) ? role : "other";
  // Tokens stand for the texts of an answer.
  const texts = drawColoured ? parts.filter((part) => part.kind !== "text" || part.title) : parts;
  return h(
    `div.message.${kind}`,
    null,
    h("h3", null, h("bdi", null, role.slice(0, 60) || "message")),
    drawColoured ? h("div", null, drawColoured()) : null,
    texts.map((part) => drawPart(part, kind)),
    parts.length || drawColoured ? null : h("p.soft", null, "empty"),
  );
}

/** @param {Part} part @param {string} role */
function drawPart(part, role) {
  const isLong = part.text.length > FOLDED_LETTERS;
  const line = part.text.slice(0, LINE_LETTERS).replace(/\s+/g, " ");
  const names = { call: "calls ", result: part.title ? "result of " : "result", thought: "", other: "", text: "" };
  const isText = part.kind === "text" && !(isLong && role === "system");
  const title = h("span.part-title", null, names[part.kind], h("bdi", null, part.title.slice(0, 100)));
  const body =
    part.kind === "call" || part.kind === "other"
      ? h("pre.part", null, foldText(part.text))
      : h("p.prose", { dir: "auto" }, foldText(part.text));
  if (isText) return part.title ? [title, body] : body;
  const summary = h("summary", null, title, " ", h("bdi.soft", null, line, part.text.length > LINE_LETTERS ? "…" : ""));
  return h("details.part", { open: part.kind === "result" && !isLong }, summary, body);
}

/** @param {string} text A text of which a button shows the rest, if it is long. */
function foldText(text) {
  if (text.length <= MOST_LETTERS) return text;
  const rest = h(
    "button.link",
    { type: "button", click: () => rest.replaceWith(text.slice(MOST_LETTERS)) },
    `Show all ${integer(text.length)} characters`,
  );
  return [text.slice(0, MOST_LETTERS), "… ", rest];
}
