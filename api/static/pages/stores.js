// @ts-check
/** All stores of the server. */

import { storeHref } from "../app.js";
import { emptyState, h, replace } from "../dom.js";

export function title() {
  return "Stores";
}

/** @param {HTMLElement} root @param {import("../app.js").Context} context */
export async function render(root, { server }) {
  replace(root, h("h1", null, "Stores"), server.stores?.length
    ? h("ul", null, server.stores.map((name) => h("li", null, h("a", { href: storeHref(name) }, name))))
    : emptyState("There are no stores here yet."));
}
