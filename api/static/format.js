// @ts-check
/** Numbers, sizes and times as people read them. */

const INTEGER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** @param {number | null | undefined} value Such as 1234567: "1,234,567". */
export function integer(value) {
  return value === null || value === undefined ? "–" : INTEGER.format(value);
}

/** @param {number | null | undefined} value Such as 1234567: "1.2M". */
export function compact(value) {
  return value === null || value === undefined ? "–" : SHORT.format(value);
}

/** @param {any} value A measured number, with at most four significant digits. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return INTEGER.format(value);
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** @param {number | null | undefined} value Bytes, in powers of 1024. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.round((seconds % 86_400) / 3600)} h`;
}

/** @param {string | number | null | undefined} time ISO text without a zone is UTC; shown in the reader's zone. */
export function time(time) {
  if (time === null || time === undefined) return "–";
  const text = typeof time === "string" && !/[zZ]|[+-]\d\d:?\d\d$/.test(time) ? `${time.replace(" ", "T")}Z` : time;
  const moment = new Date(text);
  if (Number.isNaN(moment.getTime())) return String(time);
  const pad = (/** @type {number} */ part) => String(part).padStart(2, "0");
  const day = `${moment.getFullYear()}-${pad(moment.getMonth() + 1)}-${pad(moment.getDate())}`;
  return `${day} ${pad(moment.getHours())}:${pad(moment.getMinutes())}:${pad(moment.getSeconds())}`;
}

/**
 * A cell of a table of unknown content, such as a seed: numbers with all digits, texts cut to a readable length.
 *
 * @param {any} value
 */
export function cell(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  return text.length > 200 ? `${text.slice(0, 199)}…` : text;
}
