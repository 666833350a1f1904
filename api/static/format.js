// @ts-check
/** Numbers, sizes and times as people read them. A value that is missing is the word "unknown". */

const INTEGER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNKNOWN = "unknown";
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** @param {number | null | undefined} value Such as 1234567: "1,234,567". */
export function integer(value) {
  return value === null || value === undefined ? UNKNOWN : INTEGER.format(value);
}

/** @param {number | null | undefined} value Such as 1234567: "1.2M". */
export function compact(value) {
  return value === null || value === undefined ? UNKNOWN : SHORT.format(value);
}

/** @param {any} value A measured number, with at most four significant digits. */
export function number(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return INTEGER.format(value);
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** @param {number | null | undefined} value Bytes, in powers of 1024. */
export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

/** A unit, its seconds, and the unit of the rest. */
const UNITS = /** @type {[string, number, string, number][]} */ ([
  ["d", 86_400, "h", 3600],
  ["h", 3600, "min", 60],
  ["min", 60, "s", 1],
]);

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds !== 0 && seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
  const [unit, size, part, step] =
    UNITS.find(([, least, , each]) => Math.round(seconds / each) * each >= least) ?? UNITS[2];
  const whole = Math.round(seconds / step);
  const rest = whole % (size / step);
  return `${Math.floor((whole * step) / size)} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
}

/** @param {number} seconds How long ago something was: "3 min ago". */
export function ago(seconds) {
  return seconds < 1 ? "just now" : `${duration(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

/**
 * Labels of the ticks of an axis, without those that would repeat the one before.
 *
 * @param {string[]} labels
 */
export function distinct(labels) {
  return labels.map((label, number) => (label === labels[number - 1] ? "" : label));
}

/**
 * Milliseconds since 1970 of a time; NaN: it is none.
 *
 * @param {any} time ISO text without a zone is UTC.
 */
export function toMilliseconds(time) {
  const hasZone = typeof time !== "string" || /[zZ]|[+-]\d\d(:?\d\d)?$/.test(time.slice(19));
  return new Date(hasZone ? time : `${time.replace(" ", "T")}Z`).getTime();
}

/** @param {string | number | null | undefined} time ISO text without a zone is UTC; shown in the reader's zone. */
export function time(time) {
  if (time === null || time === undefined) return UNKNOWN;
  const moment = new Date(toMilliseconds(time));
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

/** @param {string} text @param {number} [most] */
export function shorten(text, most = 60) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
