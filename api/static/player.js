// @ts-check
/** Play an episode: the frames of its image fields on canvases, and a clock that moves from step to step. */

import { request, storePath } from "./client.js";
import { h, replace } from "./dom.js";

/** Bytes of pixels that are kept, over all fields. */
const MOST_BYTES = 64 * 1024 * 1024;
/** Frames of one request, unless they are large. */
const WINDOW = 64;
/** Bytes of one request, about. */
const WINDOW_BYTES = 8 * 1024 * 1024;
/** Larger images are reduced by the server to this side. */
const MOST_SIDE = 512;
/** Requests of one field at a time. */
const REQUESTS = 2;
/** Small images are enlarged to about this side, in CSS pixels: of one field, of two, and of more. */
const ENLARGED = [480, 336, 240];
/** Large images are shown with this side. */
const REDUCED = [720, 480, 320];
/** Steps per second at normal speed. */
const STEPS_PER_SECOND = 30;
const SPEEDS = [0.25, 0.5, 1, 2, 4, 8, 16];

/** @typedef {{step: number, width: number, height: number, channels: number, pixels: Uint8Array}} Frame */
/** @typedef {{start: number, bytes: number, frames: Frame[], used: number}} Window */

/**
 * Fetch frames of one field.
 *
 * @param {object} options
 * @param {string} options.store
 * @param {number} options.episode
 * @param {string} options.field
 * @param {Record<string, any>} options.select Parameters that choose frames: `start` and `count`, or `steps`.
 * @param {number} options.side Most pixels of the longer side.
 * @param {AbortSignal} [options.signal]
 * @returns {Promise<Frame[]>}
 */
export async function loadFrames({ store, episode, field, select, side, signal }) {
  const response = await request(storePath(store, `/episodes/${episode}/frames`), {
    query: { field, ...select, max_side: side, format: "raw" },
    accept: "*/*",
    signal,
  });
  const [count, height, width, channels] = (response.headers.get("X-Shape") ?? "").split(",").map(Number);
  const steps = (response.headers.get("X-Steps") ?? "").split(",").map(Number);
  const pixels = new Uint8Array(await response.arrayBuffer());
  const size = height * width * channels;
  return Array.from({ length: count }, (_, number) => ({
    step: steps[number],
    width,
    height,
    channels,
    pixels: pixels.subarray(number * size, (number + 1) * size),
  }));
}

/**
 * Draw a frame; the canvas gets its size.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Frame} frame
 */
export function drawFrame(canvas, { width, height, channels, pixels }) {
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const image = new ImageData(width, height);
  const { data } = image;
  for (let from = 0, to = 0; to < data.length; from += channels, to += 4) {
    data[to] = pixels[from];
    data[to + 1] = pixels[channels < 3 ? from : from + 1];
    data[to + 2] = pixels[channels < 3 ? from : from + 2];
    data[to + 3] = channels === 4 ? pixels[from + 3] : 255;
  }
  canvas.getContext("2d")?.putImageData(image, 0, 0);
}

/** Frames of one field: windows around the step that is shown are fetched, and the oldest ones are dropped. */
export class FrameCache {
  /**
   * @param {object} options
   * @param {(start: number, count: number, signal: AbortSignal) => Promise<Frame[]>} options.load Returns the frame
   *   of each step, with holes for steps that have left the store.
   * @param {number} options.frameBytes Bytes of a frame, to choose the size of windows.
   * @param {number} options.most Bytes that are kept.
   * @param {() => number} options.count Number of steps of the episode.
   * @param {() => void} options.onLoad Called after each window.
   * @param {(error: any) => void} options.onError
   * @param {AbortSignal} options.signal
   */
  constructor(options) {
    this.options = options;
    const fit = Math.floor(Math.min(WINDOW_BYTES, options.most / 4) / Math.max(1, options.frameBytes));
    this.window = Math.max(1, Math.min(WINDOW, fit));
    /** @type {Map<number, Window>} */
    this.windows = new Map();
    /** @type {Map<number, AbortController>} */
    this.loads = new Map();
    this.bytes = 0;
    this.clock = 0;
    this.failed = false;
  }

  /** @param {number} step Whether its window is loaded. Without a frame, the step has left the store. */
  has(step) {
    return this.windows.has(Math.floor(step / this.window));
  }

  /** @param {number} step @returns {Frame | null} Null: not loaded yet, or not in the store any more. */
  get(step) {
    const found = this.windows.get(Math.floor(step / this.window));
    if (!found) return null;
    found.used = ++this.clock;
    return found.frames[step - found.start] ?? null;
  }

  /**
   * Fetch the window of a step and those that follow.
   *
   * @param {number} step
   * @param {number} ahead Windows to fetch ahead.
   */
  want(step, ahead) {
    if (this.failed || document.hidden || this.options.signal.aborted) return;
    const first = Math.floor(step / this.window);
    const last = Math.floor((this.options.count() - 1) / this.window);
    const keep = Math.max(1, Math.floor(this.options.most / (this.window * Math.max(1, this.options.frameBytes))) - 1);
    const wanted = [];
    for (let number = first; number <= Math.min(last, first + Math.min(ahead, keep - 1)); number += 1)
      wanted.push(number);
    for (const [number, load] of this.loads) {
      if (!wanted.includes(number)) {
        this.loads.delete(number);
        load.abort();
      }
    }
    for (const number of wanted) {
      if (this.loads.size >= REQUESTS) break;
      if (!this.windows.has(number) && !this.loads.has(number)) this.#load(number, () => this.want(step, ahead));
    }
  }

  /** @param {number} step Drop the window of a step, also if it is on its way, since the episode has grown. */
  forget(step) {
    const number = Math.floor(step / this.window);
    this.loads.get(number)?.abort();
    this.loads.delete(number);
    this.bytes -= this.windows.get(number)?.bytes ?? 0;
    this.windows.delete(number);
  }

  /** @param {number} number @param {() => void} next */
  async #load(number, next) {
    const abort = new AbortController();
    this.loads.set(number, abort);
    const start = number * this.window;
    try {
      const count = Math.min(this.window, this.options.count() - start);
      const frames = await this.options.load(start, count, AbortSignal.any([abort.signal, this.options.signal]));
      if (abort.signal.aborted) return;
      const bytes = frames.reduce((total, frame) => total + frame.pixels.length, 0);
      this.windows.set(number, { start, frames, bytes, used: ++this.clock });
      this.bytes += bytes;
      this.#drop(number);
      this.loads.delete(number);
      this.options.onLoad();
      next();
    } catch (error) {
      if (abort.signal.aborted || this.options.signal.aborted) return;
      this.loads.delete(number);
      this.failed = true;
      this.options.onError(error);
    }
  }

  /** @param {number} newest Window that stays. */
  #drop(newest) {
    const byUse = [...this.windows].sort(([, a], [, b]) => a.used - b.used);
    for (const [number, window] of byUse) {
      if (this.bytes <= this.options.most) return;
      if (number === newest) continue;
      this.windows.delete(number);
      this.bytes -= window.bytes;
    }
  }
}

/**
 * @typedef {object} Player
 * @property {HTMLElement} element
 * @property {() => number} step
 * @property {(step: number) => void} seek
 * @property {(step: number) => void} show Show a step without pausing.
 * @property {(fields: any[]) => void} setFields Show other image fields.
 * @property {(count: number, first?: number) => void} setCount Tell that the episode has grown, or its first step.
 * @property {() => void} pause
 */

/**
 * Make a player. Space plays and pauses, the arrow keys step (with Shift by 10), Home and End go to the ends;
 * they work wherever nothing else uses these keys.
 *
 * @param {object} options
 * @param {string} options.store
 * @param {number} options.episode
 * @param {any[]} options.fields Image fields, as the summary describes them.
 * @param {number} options.first Number of the first step that can be read at the start.
 * @param {number} options.count Number of steps from there to the end of the episode.
 * @param {number} options.step Position at the start, from 0.
 * @param {number} options.speed
 * @param {boolean} options.loop
 * @param {"all" | "steps" | "none"} [options.controls] "steps": nothing plays; "none": another player moves this one.
 * @param {(step: number) => void} options.onStep Called when another step is shown.
 * @param {(step: number) => void} options.onRest Called when the reader has stopped at a step.
 * @param {(changes: {speed?: number, loop?: boolean}) => void} options.onChange
 * @param {AbortSignal} options.signal
 * @returns {Player}
 */
export function createPlayer(options) {
  const { store, episode, signal, controls = "all" } = options;
  let { first } = options;
  let { count, speed, loop } = options;
  let step = Math.max(0, Math.min(options.step, count - 1));
  let playing = false;
  let last = 0;
  let due = 0;
  /** @type {{field: any, cache: FrameCache, canvas: HTMLCanvasElement, note: HTMLElement}[]} */
  let views = [];
  let viewsEnd = new AbortController();

  const play = h(
    "button.play.primary",
    { type: "button", click: () => (playing ? pause() : start()), title: "Play or pause (Space)" },
    "Play",
  );
  const slider = h("input.grow", {
    type: "range",
    min: "0",
    max: String(count - 1),
    step: "1",
    "aria-label": "Step",
    input: () => {
      pause();
      show(Number(slider.value));
    },
    change: () => options.onRest(step),
  });
  const place = h("output.mono.place", { "aria-live": "off" });
  const jump = (/** @type {string} */ text, /** @type {string} */ label, /** @type {() => number} */ target) =>
    h("button", { type: "button", "aria-label": label, title: label, click: () => seek(target()) }, text);
  const speeds = h(
    "select",
    {
      "aria-label": "Speed",
      change: () => {
        speed = Number(speeds.value);
        options.onChange({ speed });
      },
    },
    SPEEDS.map((value) => h("option", { value: String(value), selected: value === speed }, `${value}×`)),
  );
  const looping = h("input", {
    type: "checkbox",
    checked: loop,
    change: () => {
      loop = looping.checked;
      options.onChange({ loop });
    },
  });
  const screens = h("div.screens");
  const element = h(
    "section.player.card",
    { "aria-label": "Player" },
    screens,
    h(
      "div.row.player-controls",
      { hidden: controls === "none" },
      jump("«", "First step (Home)", () => 0),
      jump("‹", "Step back (Left)", () => step - 1),
      controls === "all" ? play : null,
      jump("›", "Step forward (Right)", () => step + 1),
      jump("»", "Last step (End)", () => count - 1),
      slider,
      place,
      controls === "all" ? [speeds, h("label.tick", null, looping, "Loop")] : null,
    ),
  );

  /** @param {any[]} fields */
  function setFields(fields) {
    viewsEnd.abort();
    viewsEnd = new AbortController();
    signal.addEventListener("abort", () => viewsEnd.abort(), { once: true });
    const end = viewsEnd.signal;
    const most = MOST_BYTES / Math.max(1, fields.length);
    views = fields.map((field) => {
      const canvas = h("canvas", {
        role: "img",
        "aria-label": `${field.name} at the step shown`,
        width: "8",
        height: "8",
      });
      const note = h("p.soft.note", { role: "status" });
      const size = sizeOf(field);
      resizeCanvas(canvas, size, fields.length);
      const view = {
        field,
        canvas,
        note,
        cache: new FrameCache({
          load: async (start, frames, abort) => {
            const select = { start: first + start, count: frames };
            /** @type {Frame[]} */
            const placed = [];
            for (const frame of await loadFrames({
              store,
              episode,
              field: field.name,
              select,
              side: MOST_SIDE,
              signal: abort,
            }))
              placed[frame.step - select.start] = frame;
            return placed;
          },
          frameBytes: size.bytes,
          most,
          count: () => count,
          signal: end,
          onLoad: () => draw(),
          onError: (error) => {
            note.textContent = error.message;
            draw();
          },
        }),
      };
      return view;
    });
    replace(
      screens,
      views.map(({ field, canvas, note }) => h("figure.screen", null, canvas, h("figcaption", null, field.name), note)),
    );
    screens.hidden = views.length === 0;
    draw();
  }

  /** Draw the step; return whether all frames were there. */
  function draw() {
    let complete = true;
    for (const view of views) {
      const frame = view.cache.get(step);
      if (frame) {
        drawFrame(view.canvas, frame);
        view.canvas.dataset.step = String(step);
      } else if (!view.cache.failed && !view.cache.has(step)) {
        complete = false;
      }
      view.cache.want(step, playing ? 3 : 1);
      if (!view.cache.failed)
        view.note.textContent = !frame && view.cache.has(step) ? "This step has left the store." : "";
      view.canvas.classList.toggle("stale", !frame);
    }
    slider.value = String(step);
    place.textContent = `step ${first + step} of ${first + count - 1}`;
    slider.setAttribute("aria-valuetext", `step ${first + step}`);
    return complete;
  }

  /** @param {number} next */
  function show(next) {
    const found = Math.max(0, Math.min(next, count - 1));
    if (found === step) return;
    step = found;
    draw();
    options.onStep(step);
  }

  function start() {
    if (count < 2) return;
    if (step >= count - 1) show(0);
    playing = true;
    play.textContent = "Pause";
    last = performance.now();
    due = 0;
    requestAnimationFrame(tick);
  }

  function pause() {
    if (!playing) return;
    playing = false;
    play.textContent = "Play";
    options.onRest(step);
  }

  /** @param {number} now */
  function tick(now) {
    if (!playing || signal.aborted) return;
    due += (Math.min(now - last, 250) / 1000) * STEPS_PER_SECOND * speed;
    last = now;
    const whole = Math.floor(due);
    if (whole > 0) {
      // A step whose frames are on their way is waited for, not skipped.
      if (!draw()) due = 0;
      else {
        due -= whole;
        const next = step + whole;
        if (next > count - 1 && loop) show(0);
        else show(next);
        if (step >= count - 1 && !loop) pause();
      }
    }
    requestAnimationFrame(tick);
  }

  /** @param {number} next */
  function seek(next) {
    pause();
    show(next);
    options.onRest(step);
  }

  document.addEventListener(
    "keydown",
    (event) => {
      if (controls === "none" || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      const target = /** @type {HTMLElement} */ (event.target);
      if (target !== slider && target.closest("input, textarea, select, .scroll, [contenteditable]")) return;
      if (event.key === " ") {
        if (target.closest("button, a, summary")) return; // these use the key themselves
        if (controls !== "all") return;
        if (playing) pause();
        else start();
      } else {
        const by = event.shiftKey ? 10 : 1;
        const to = { ArrowLeft: step - by, ArrowRight: step + by, Home: 0, End: count - 1 }[event.key];
        if (to === undefined) return;
        seek(to);
      }
      event.preventDefault();
    },
    { signal },
  );

  document.addEventListener(
    "visibilitychange",
    () => {
      if (!document.hidden) draw();
    },
    { signal },
  );
  setFields(options.fields);
  return {
    element,
    seek,
    setFields,
    pause,
    step: () => step,
    show,
    setCount(next, from = first) {
      for (const { cache } of views) cache.forget(count - 1);
      [count, first] = [next, from];
      slider.max = String(count - 1);
      draw();
    },
  };
}

/** Height, width and bytes of the frames of a field, as the server sends them. */
function sizeOf(/** @type {any} */ field) {
  const shape = field.shape;
  const [height, width, depth] =
    field.image_layout === "CHW" || (field.image_layout === "stacked" && shape[0] < shape[2])
      ? [shape[1], shape[2], shape[0]]
      : [shape[0], shape[1], shape[2] ?? 1];
  const scale = Math.min(1, MOST_SIDE / Math.max(height, width));
  const channels = depth % 3 === 0 ? 3 : 1;
  return { height, width, bytes: Math.ceil(height * scale) * Math.ceil(width * scale) * channels };
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {{height: number, width: number}} size
 * @param {number} fields Number of fields.
 */
function resizeCanvas(canvas, { height, width }, fields) {
  const side = Math.max(height, width);
  const place = Math.min(fields, ENLARGED.length) - 1;
  const scale =
    side >= ENLARGED[place] ? Math.min(1, REDUCED[place] / side) : Math.max(1, Math.round(ENLARGED[place] / side));
  canvas.style.width = `${width * scale}px`;
  canvas.style.aspectRatio = `${width} / ${height}`;
}
