// @ts-check
/** The frame around every page: addresses, navigation, the connection to the server, the token. */

import { href } from "./addresses.js";
import {
  ApiError,
  decodeSafely,
  getJson,
  hasToken,
  isAlive,
  onConnection,
  setConnection,
  setToken,
  takeTokenFromAddress,
} from "./client.js";
import { emptyState, errorState, h, replace, updateTime } from "./dom.js";
import { FILTER } from "./episode_data.js";

/**
 * What a page gets.
 *
 * @typedef {object} Context
 * @property {Record<string, string>} params Parts of the path, such as `store` and `episode`.
 * @property {URLSearchParams} query The state of the page, as it was when the page was opened.
 * @property {(changes: Record<string, any>, options?: {push?: boolean}) => void} setQuery Write changes of the
 *   state into the address, so that a link shows the same; null and "" remove an entry. `push` makes an entry
 *   of the browser's history, to which Back returns.
 * @property {AbortSignal} signal Aborted when the reader leaves the page.
 * @property {{stores: string[], access: "read" | "write", sql: boolean}} server What the server offers.
 */

/** Pages by path. Each module exports `title(params)` and `render(root, context)`. */
const PAGES = [
  { path: /^\/$/, names: [], load: () => import("./pages/stores.js") },
  { path: /^\/compare$/, names: [], load: () => import("./pages/compare.js") },
  { path: /^\/stores\/([^/]+)$/, names: ["store"], load: () => import("./pages/store.js") },
  { path: /^\/stores\/([^/]+)\/episodes$/, names: ["store"], load: () => import("./pages/episodes.js") },
  {
    path: /^\/stores\/([^/]+)\/episodes\/(\d+)$/,
    names: ["store", "episode"],
    load: () => import("./pages/episode.js"),
  },
  { path: /^\/stores\/([^/]+)\/pair$/, names: ["store"], load: () => import("./pages/pair.js") },
  { path: /^\/stores\/([^/]+)\/lists$/, names: ["store"], load: () => import("./pages/lists.js") },
  { path: /^\/stores\/([^/]+)\/sql$/, names: ["store"], load: () => import("./pages/sql.js") },
  { path: /^\/stores\/([^/]+)\/sampling$/, names: ["store"], load: () => import("./pages/sampling.js") },
];
/** Milliseconds after which a page without content says that loading takes long. */
const LONG = 4000;
/** Pages of one store, for the navigation; the first ones share their filter. */
const TABS = [
  ["", "Overview"],
  ["/episodes", "Episodes"],
  ["/pair", "Two episodes"],
  ["/lists", "Lists"],
  ["/sql", "SQL"],
  ["/sampling", "Sampling"],
];

const root = /** @type {HTMLElement} */ (document.getElementById("page"));
const nav = /** @type {HTMLElement} */ (document.getElementById("nav"));
const banner = /** @type {HTMLElement} */ (document.getElementById("banner"));
const status = /** @type {HTMLElement} */ (document.getElementById("status"));

/** @type {AbortController} */
let current = new AbortController();
/** The address that is shown. */
let address = "";

function read() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split(/\?(.*)/s);
  return { path: path || "/", query: new URLSearchParams(query) };
}

/** Show the page of the address. */
async function show() {
  if (location.hash === "#page") {
    // the link that skips the navigation
    root.focus();
    history.replaceState(null, "", address || "#/");
    return;
  }
  address = location.hash;
  current.abort();
  const here = new AbortController();
  current = here;
  const { path, query } = read();
  const page = PAGES.map((entry) => ({ entry, match: entry.path.exec(path) })).find(({ match }) => match);
  if (!page?.match) {
    drawNavigation(null, path);
    replace(root, emptyState("There is no such page.", h("a", { href: "#/" }, "All stores")));
    document.body.dataset.ready = path;
    return;
  }
  const values = page.match.slice(1).map(decodeSafely);
  const params = Object.fromEntries(page.entry.names.map((name, number) => [name, values[number]]));
  drawNavigation(params.store ?? null, path);
  document.body.removeAttribute("data-ready");
  const note = h("p.loading", { role: "status" }, "Loading…"); // a page replaces it
  if (root.childElementCount === 0) root.append(note);
  const timer = setTimeout(() => {
    note.textContent = "Still loading: the server is busy.";
  }, LONG);
  try {
    const [module, server] = await Promise.all([page.entry.load(), getJson("v1/stores", { signal: here.signal })]);
    if (here.signal.aborted) return;
    document.title = `${module.title(params)} · expstore`;
    root.replaceChildren(note);
    const setQuery = (/** @type {Record<string, any>} */ changes, { push = false } = {}) => {
      if (here.signal.aborted) return;
      const entries = { ...Object.fromEntries(read().query), ...changes };
      const next = href(path, entries);
      if (next === location.hash) return;
      history[push ? "pushState" : "replaceState"](null, "", next);
      address = next;
      drawNavigation(params.store ?? null, path);
    };
    await module.render(root, { params, query, setQuery, signal: here.signal, server });
  } catch (error) {
    clearTimeout(timer);
    if (here.signal.aborted) return;
    const code = error instanceof ApiError ? error.status : null;
    if (code === 401) return; // the question for the token is shown
    replace(root, errorState(error), code === 404 ? h("p", null, h("a", { href: "#/" }, "All stores")) : null);
  }
  clearTimeout(timer);
  if (!here.signal.aborted) document.body.dataset.ready = path;
}

/** @param {string | null} store @param {string} path */
function drawNavigation(store, path) {
  const link = (/** @type {string} */ to, /** @type {string} */ text, /** @type {boolean} */ here) =>
    h("a", { href: to, "aria-current": here ? "page" : null }, text);
  const isFiltered = (/** @type {string} */ at) => !/\/(sql|sampling)$/.test(at); // their `where` is of rows
  const shared = [...read().query].filter(([name]) => isFiltered(path) && FILTER.includes(name));
  const filter = new URLSearchParams(shared).toString();
  const base = store === null ? "" : `/stores/${encodeURIComponent(store)}`;
  replace(
    nav,
    link("#/", "Stores", path === "/"),
    link("#/compare", "Compare", path === "/compare"),
    store === null
      ? null
      : [
          h("span.nav-store", { title: store }, store),
          TABS.map(([rest, text]) =>
            link(
              `#${base}${rest}${filter && isFiltered(rest) ? `?${filter}` : ""}`,
              text,
              rest === "" ? path === base : path.startsWith(base + rest),
            ),
          ),
        ],
  );
  const here = /** @type {HTMLElement | null} */ (nav.querySelector("[aria-current]"));
  if (here) nav.scrollLeft = here.offsetLeft - nav.offsetLeft - nav.clientWidth / 2; // on a phone
}

/** Ask for the token, and try again with it. */
function askForToken() {
  current.abort();
  const wrong = hasToken();
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, size: 40 });
  const form = h(
    "form.card.token",
    {
      submit: (/** @type {Event} */ event) => {
        event.preventDefault();
        setToken(field.value.trim());
        setConnection("online");
        show();
      },
    },
    h("h1", null, "This server needs a token"),
    wrong ? h("p.error", { role: "alert" }, "The server does not know this token.") : null,
    h(
      "p",
      null,
      "It is in the file that the server was started with: --read-token-file to look, --token-file to change facts, too. ",
      "The page keeps it until this tab is closed.",
    ),
    h("label", { for: "token" }, "Token"),
    field,
    h("button.primary", { type: "submit" }, "Open"),
  );
  replace(root, form);
  field.focus();
  document.body.dataset.ready = "token";
}

/** Wait until the server answers again, then show the page anew. */
async function waitForServer() {
  let pause = 500;
  while (!(await isAlive())) {
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, 5000);
  }
  setConnection("online");
  show();
}

function start() {
  takeTokenFromAddress();
  onConnection((state) => {
    status.dataset.state = state;
    status.textContent = { online: "connected", offline: "no connection", unauthorized: "token needed" }[state];
    banner.hidden = state !== "offline";
    banner.textContent = state === "offline" ? "The server does not answer. This page continues when it is back." : "";
    if (state === "offline") waitForServer();
    if (state === "unauthorized") askForToken();
  });
  window.addEventListener("hashchange", () => {
    takeTokenFromAddress();
    if (location.hash !== address) show();
  });
  window.addEventListener("popstate", () => {
    if (location.hash !== address) show();
  });
  setInterval(() => document.querySelectorAll("time[data-at]").forEach(/** @type {any} */ (updateTime)), 10_000);
  show();
}

start();
