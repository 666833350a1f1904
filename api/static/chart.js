// @ts-check
/** Charts, drawn by uPlot in the colours of the style sheet, each with its figures as a table for screen readers. */

import { h } from "./dom.js";
import { distinct, duration, number, time as formatTime } from "./format.js";
import { table } from "./table.js";

const uPlot = /** @type {any} */ (window).uPlot;
/** Most points of a series. */
const MOST_POINTS = 10_000;
/** Number of `--series-N` colours. */
export const COLOURS = 8;

/**
 * A colour of the style sheet, for the scheme that the reader uses; canvases do not know `light-dark()`.
 *
 * @param {string} name Of a custom property.
 */
function css(name) {
  const probe = h("span", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

/**
 * A colour that stays the same for a name, within a set of names.
 *
 * @param {string} name
 * @param {string[]} names All names that share a chart.
 */
export function colourOf(name, names) {
  return paletteColour(Math.max(0, [...names].sort().indexOf(name)));
}

/** @param {number} number A colour of the palette for lines, which begins again after the eighth. */
export function paletteColour(number) {
  return css(`--series-${(number % COLOURS) + 1}`);
}

/**
 * @typedef {object} Series
 * @property {string} label
 * @property {(number | null)[]} values One per x; null: a gap.
 * @property {string | (() => string)} [colour] A function is called anew when the reader's scheme changes.
 * @property {(number | null)[]} [low] Lower edge of a band around the values; both edges are drawn faintly.
 * @property {(number | null)[]} [high]
 * @property {boolean} [steps] Whether a value stays until the next one.
 */

/**
 * @typedef {object} Chart
 * @property {(x: number[], series: Series[]) => void} setData
 * @property {(marks: {x: number, label: string}[]) => void} setMarks Draw a line with a label at places of the x axis.
 * @property {(x: number | null) => void} setCursor Mark a place of the x axis.
 * @property {(low: number | null, high: number | null) => void} setRange Mark a range of the x axis.
 * @property {HTMLElement} element
 */

/**
 * Draw lines over a common x axis. The chart is as wide as its container and follows it.
 *
 * @param {HTMLElement} container
 * @param {object} options
 * @param {string} options.title What the chart shows; read by screen readers.
 * @param {number[]} options.x
 * @param {Series[]} options.series
 * @param {string} [options.xLabel]
 * @param {string} [options.yLabel]
 * @param {boolean} [options.isTime] Whether x is in milliseconds since 1970.
 * @param {boolean} [options.isDuration] Whether x is in seconds.
 * @param {number} [options.height] In pixels.
 * @param {boolean} [options.points] Whether to draw a dot per value.
 * @param {boolean} [options.lines] Whether to connect the values; default: true.
 * @param {boolean} [options.bars] Whether to draw bars.
 * @param {boolean} [options.isLog] Whether x grows by factors.
 * @param {string} [options.sync] Charts of the same name share their cursor.
 * @param {(x: number) => void} [options.onSelect] Called with the x at which the reader clicks.
 * @param {(low: number, high: number) => void} [options.onRange] Called with the range that the reader drags over.
 * @param {AbortSignal} [options.signal] Ends the chart.
 * @returns {Chart}
 */
export function lineChart(container, options) {
  const place = h("div.plot", { "aria-hidden": "true" });
  const figures = h("div");
  const details = h(
    "details.figures",
    {
      toggle: () => {
        if (details.open) figures.replaceChildren(figureTable(options, x, series));
        else figures.replaceChildren();
      },
    },
    h("summary", null, "Figures"),
    figures,
  );
  const element = h("figure.chart", { role: "group", "aria-label": options.title }, place, details);
  container.replaceChildren(element);
  let { x, series } = options;
  /** @type {any} */
  let plot = null;
  /** @type {number | null} */
  let marked = null;
  /** @type {[number, number] | null} */
  let range = null;
  /** @type {{x: number, label: string}[]} */
  let marks = [];

  // An element over the plot, so that a cursor that moves with each step does not draw the lines again.
  const cursor = h("div.chart-cursor", { hidden: true });
  const placeCursor = () => {
    const left = marked === null ? NaN : plot.valToPos(marked, "x");
    cursor.hidden = !(left >= 0 && left <= plot.over.clientWidth);
    cursor.style.transform = `translateX(${left}px)`;
  };

  const draw = () => {
    plot?.destroy();
    plot = new uPlot(
      settings(options, x, series, place, placeCursor, () => ({ range, marks })),
      dataOf(x, series),
      place,
    );
    plot.over.append(cursor);
    // After a drag uPlot lets no click through.
    plot.over.addEventListener("click", (/** @type {MouseEvent} */ event) =>
      options.onSelect?.(plot.posToVal(event.offsetX, "x")),
    );
    placeCursor();
  };
  const resize = new ResizeObserver(() => {
    if (plot && place.clientWidth > 0 && place.clientWidth !== plot.width)
      plot.setSize({ width: place.clientWidth, height: plot.height });
  });
  resize.observe(place);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", draw);
  options.signal?.addEventListener("abort", () => {
    resize.disconnect();
    scheme.removeEventListener("change", draw);
    plot?.destroy();
    plot = null;
  });
  draw();
  return {
    element,
    setData(nextX, nextSeries) {
      const same =
        plot &&
        nextSeries.length === series.length &&
        nextSeries.every(
          (entry, number) => entry.label === series[number].label && Boolean(entry.low) === Boolean(series[number].low),
        );
      x = nextX;
      series = nextSeries;
      if (same) plot.setData(dataOf(x, series));
      else draw();
      if (details.open) figures.replaceChildren(figureTable(options, x, series));
    },
    setMarks(next) {
      marks = next;
      plot?.redraw(false, false);
    },
    setCursor(value) {
      marked = value;
      if (plot) placeCursor();
    },
    setRange(low, high) {
      range = low === null || high === null ? null : [low, high];
      plot?.redraw(false, false);
    },
  };
}

/** Columns of uPlot: x, then for each series its values and the two edges of its band. */
function dataOf(/** @type {number[]} */ x, /** @type {Series[]} */ series) {
  return [x, ...series.flatMap((one) => (one.low && one.high ? [one.values, one.low, one.high] : [one.values]))];
}

/**
 * A range around one value, which is wider than what the value is rounded to: uPlot finds no ticks in an empty one.
 *
 * @param {number} value
 */
function around(value) {
  const margin = Math.max(1, Math.abs(value) / 1e6);
  return [value - margin, value + margin];
}

function settings(
  /** @type {any} */ options,
  /** @type {number[]} */ x,
  /** @type {Series[]} */ series,
  /** @type {HTMLElement} */ place,
  /** @type {() => void} */ placeCursor,
  /** @type {() => {range: [number, number] | null, marks: {x: number, label: string}[]}} */ overlay,
) {
  const ink = css("--ink-soft");
  const line = css("--line");
  const axis = {
    stroke: ink,
    grid: { stroke: line, width: 1 },
    ticks: { stroke: line, width: 1 },
    font: "12px system-ui",
    labelFont: "12px system-ui",
  };
  const bands = [];
  const entries = [];
  for (const one of series) {
    const colour =
      (typeof one.colour === "function" ? one.colour() : one.colour) ??
      colourOf(
        one.label,
        series.map((each) => each.label),
      );
    const paths = options.bars
      ? uPlot.paths.bars({ size: [1, 100], gap: 1 })
      : one.steps
        ? uPlot.paths.stepped({ align: 1 })
        : undefined;
    entries.push({
      label: one.label,
      stroke: colour,
      width: options.bars || options.lines === false ? 0 : 1.5,
      paths,
      spanGaps: true,
      fill: options.bars ? colour : undefined,
      points: { show: options.points ?? x.length < 2, size: 4, fill: colour, stroke: colour, width: 1 },
      value: (/** @type {any} */ _, /** @type {number | null} */ value) => (value === null ? "" : number(value)),
    });
    if (one.low && one.high) {
      const edge = {
        stroke: `color-mix(in srgb, ${colour} 22%, transparent)`,
        width: 1,
        points: { show: false },
        spanGaps: true,
        class: "band-edge",
      };
      entries.push({ label: `${one.label} low`, ...edge }, { label: `${one.label} high`, ...edge });
      bands.push({
        series: [entries.length, entries.length - 1],
        fill: `color-mix(in srgb, ${colour} 18%, transparent)`,
      });
    }
  }
  return {
    width: Math.max(place.clientWidth, 200),
    height: options.height ?? 220,
    ms: 1,
    bands,
    scales: {
      x: {
        time: options.isTime ?? false,
        distr: options.isLog ? 3 : 1,
        ...(x.length === 1 && !options.isTime ? { range: around(x[0]) } : {}),
      },
      // A line of equal values is in the middle of its plot.
      y: {
        range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) =>
          low === high && low !== null ? around(low) : uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true),
      },
    },
    legend: { show: series.length > 1 || !options.bars, live: true },
    cursor: {
      sync: options.sync ? { key: options.sync } : undefined,
      points: { size: 6 },
      drag: { x: Boolean(options.onRange), y: false, setScale: false },
    },
    axes: [
      { ...axis, label: options.xLabel, labelSize: options.xLabel ? 18 : 0, size: 32, ...xTicks(options, x) },
      {
        ...axis,
        label: options.yLabel,
        labelSize: options.yLabel ? 18 : 0,
        size: 56,
        values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => distinct(ticks.map(number)),
      },
    ],
    series: [
      {
        label: options.xLabel ?? "x",
        value: (/** @type {any} */ _, /** @type {number | null} */ value) =>
          value === null ? "" : formatX(options, value),
      },
      ...entries,
    ],
    hooks: {
      setSize: [
        (/** @type {any} */ plot) => {
          if (plot.over.isConnected) requestAnimationFrame(placeCursor);
        },
      ],
      draw: [
        (/** @type {any} */ plot) => {
          const { range: chosen, marks } = overlay();
          for (const mark of marks) drawMark(plot, mark);
          if (chosen) {
            const [from, to] = chosen.map((value) =>
              Math.min(Math.max(plot.valToPos(value, "x", true), plot.bbox.left), plot.bbox.left + plot.bbox.width),
            );
            plot.ctx.save();
            plot.ctx.globalAlpha = 0.16;
            plot.ctx.fillStyle = css("--accent");
            plot.ctx.fillRect(from, plot.bbox.top, Math.max(to - from, 2), plot.bbox.height);
            plot.ctx.restore();
          }
        },
      ],
      setSelect: options.onRange
        ? [
            (/** @type {any} */ plot) => {
              const { left, width } = plot.select;
              if (width > 3) options.onRange(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
              plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            },
          ]
        : [],
    },
  };
}

/** @param {any} plot @param {{x: number, label: string}} mark */
function drawMark({ ctx, bbox, valToPos }, { x, label }) {
  const at = valToPos(x, "x", true);
  if (!(at >= bbox.left && at <= bbox.left + bbox.width)) return;
  const isRight = at > bbox.left + 0.7 * bbox.width;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--bad");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(at, bbox.top);
  ctx.lineTo(at, bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `${11 * devicePixelRatio}px system-ui`;
  ctx.textAlign = isRight ? "right" : "left";
  ctx.textBaseline = "top";
  ctx.fillText(label, at + (isRight ? -4 : 4) * devicePixelRatio, bbox.top);
  ctx.restore();
}

/** @param {any} options @param {number} value */
function formatX({ isTime, isDuration }, value) {
  return isTime ? formatTime(value) : isDuration ? duration(value) : number(value);
}

/** Seconds that a reader expects at the ticks of an axis of durations. */
const DURATIONS = [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 86_400, 604_800, 2_592_000, 31_536_000];

/** Distances of ticks on an axis of whole numbers. */
const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

/** Ticks of the x axis: times of a day or dates, durations, powers of ten, or what uPlot chooses. */
function xTicks(/** @type {any} */ { isTime, isLog, isDuration }, /** @type {number[]} */ x) {
  if (isTime) {
    return {
      space: 90,
      values: (/** @type {any} */ plot, /** @type {number[]} */ ticks) => {
        const span = plot.scales.x.max - plot.scales.x.min;
        const [from, to] = span > 2 * 86_400_000 ? [5, 16] : span > 7_200_000 ? [11, 16] : [11, 19];
        return distinct(ticks.map((tick) => formatTime(tick).slice(from, to)));
      },
    };
  }
  const values = (/** @type {any} */ _, /** @type {number[]} */ ticks) =>
    distinct(ticks.map(isDuration ? duration : number));
  if (!isLog && isDuration) return { values, incrs: DURATIONS, space: 90 };
  if (!isLog) return x.every(Number.isInteger) ? { values, incrs: WHOLE } : { values };
  return {
    space: 60,
    filter: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks, // uPlot would hide most of them
    splits: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ low, /** @type {number} */ high) => {
      const durations = DURATIONS.filter((tick) => tick >= low && tick <= high);
      if (isDuration && durations.length > 1)
        return durations.filter((___, at) => at % Math.ceil(durations.length / 6) === 0);
      const [first, last] = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))];
      return Array.from({ length: Math.max(last - first + 1, 0) }, (___, number) => 10 ** (first + number));
    },
    values: isDuration
      ? values
      : (/** @type {any} */ _, /** @type {number[]} */ ticks) =>
          ticks.map((tick) => (tick >= 0.001 && tick < 1e5 ? number(tick) : tick.toExponential(0))),
  };
}

/**
 * Draw a histogram, over a logarithmic axis if the widths of its bins grow.
 *
 * @param {HTMLElement} container
 * @param {object} options
 * @param {string} options.title
 * @param {number[]} options.edges One more than counts.
 * @param {number[]} options.counts
 * @param {string} [options.xLabel]
 * @param {boolean} [options.isDuration] Whether edges are in seconds.
 * @param {number} [options.height]
 * @param {(low: number, high: number) => void} [options.onRange]
 * @param {AbortSignal} [options.signal]
 */
export function histogram(container, options) {
  return lineChart(container, {
    ...options,
    isLog: areGrowing(options.edges),
    bars: true,
    height: options.height ?? 160,
    ...histogramData(options.edges, options.counts),
  });
}

/** @param {number[]} edges Whether the widths of these bins grow, so that a logarithmic axis suits them. */
export function areGrowing(edges) {
  const [first, second] = edges;
  return first > 0 && edges[edges.length - 1] - first > 10 * (edges.length - 1) * (second - first);
}

/**
 * The x and the series of a histogram, for `setData`.
 *
 * @param {number[]} edges
 * @param {number[]} counts
 */
export function histogramData(edges, counts) {
  return {
    x: counts.map((_, number) => (edges[number] + edges[number + 1]) / 2),
    series: [{ label: "count", values: counts, colour: () => css("--series-1") }],
  };
}

/**
 * A small line without axes.
 *
 * @param {number[]} values
 * @param {string} label Read by screen readers.
 */
export function sparkline(values, label) {
  const width = 120;
  const height = 24;
  const low = Math.min(...values);
  const span = Math.max(...values) - low || 1;
  const points = values.map(
    (value, number) =>
      `${((number / Math.max(values.length - 1, 1)) * (width - 2) + 1).toFixed(1)},${(height - 2 - ((value - low) / span) * (height - 4)).toFixed(1)}`,
  );
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": label,
    class: "sparkline",
  }))
    svg.setAttribute(name, value);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}

/**
 * Reduce a line to at most `most` points, keeping the smallest and the largest value of each piece.
 *
 * @param {number[]} x
 * @param {(number | null)[][]} columns
 * @param {number} [most]
 * @returns {{x: number[], columns: (number | null)[][]}}
 */
export function thin(x, columns, most = MOST_POINTS) {
  if (x.length <= most) return { x, columns };
  const pieces = Math.floor(most / 2);
  const outX = [];
  const out = columns.map(() => /** @type {(number | null)[]} */ ([]));
  for (let piece = 0; piece < pieces; piece += 1) {
    const from = Math.floor((piece * x.length) / pieces);
    const to = Math.floor(((piece + 1) * x.length) / pieces);
    outX.push(x[from], x[Math.max(from, to - 1)]);
    columns.forEach((column, number) => {
      let low = null;
      let high = null;
      for (let at = from; at < to; at += 1) {
        const value = column[at];
        if (value === null || value === undefined) continue;
        if (low === null || value < low) low = value;
        if (high === null || value > high) high = value;
      }
      out[number].push(low, high);
    });
  }
  return { x: outX, columns: out };
}

function figureTable(/** @type {any} */ options, /** @type {number[]} */ x, /** @type {Series[]} */ series) {
  const stride = Math.ceil(x.length / 200);
  const rows = x.map((_, at) => ({ at })).filter(({ at }) => at % stride === 0);
  const figure = (/** @type {number | null} */ value) => (value === null || value === undefined ? "" : number(value));
  return table({
    label: `Figures: ${options.title}`,
    rows,
    columns: [
      { key: "x", title: options.xLabel ?? "x", isNumber: true, draw: ({ at }) => formatX(options, x[at]) },
      ...series.map((one, place) => ({
        key: String(place),
        title: one.label,
        isNumber: true,
        draw: (/** @type {any} */ { at }) => figure(one.values[at]),
      })),
    ],
  });
}
