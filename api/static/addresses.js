// @ts-check
/** Addresses of pages: what follows `#`. */

/**
 * The address of a page.
 *
 * @param {string} path Such as "/stores/demo/episodes"; encode names with `encodeURIComponent`.
 * @param {Record<string, any>} [query]
 */
export function href(path, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parameters.set(name, String(value));
  }
  const text = parameters.toString();
  return `#${path}${text ? `?${text}` : ""}`;
}

/** @param {string} store @param {string} [rest] @param {Record<string, any>} [query] */
export function storeHref(store, rest = "", query = {}) {
  return href(`/stores/${encodeURIComponent(store)}${rest}`, query);
}
