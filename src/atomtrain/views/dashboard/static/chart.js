// A chart by uPlot (vendor/): values under the pointer, zoom by dragging, logarithmic and smooth.
//
// Charts of one group share their x: pointer and zoom go through all of them. Only charts in sight
// are drawn, one a frame, so that a page of many long curves stays smooth.

import { smoothed } from "./curves.js";
import { bytes, element, setText } from "./format.js";

const HEIGHT = 220;
const FONT = "12px system-ui, sans-serif";
const RIGHT = 26;
const LEAST_DRAG = 8;
const MOST_VALUES = 12;
const MOST_EDGED = 4;
const COLOURS = 7;
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const WHOLE_STEPS = [1, 2, 5].flatMap((n) => Array.from({ length: 13 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b);
const POWERS_OF_2 = Array.from({ length: 50 }, (_, power) => 2 ** power);
const waiting = new Set();

export class Group {
  // named: number -> text for a place on the horizontal axis, such as "step 100".
  constructor(key, named) {
    Object.assign(this, { key, named, charts: [], zoom: null });
  }

  zoomTo(zoom) {
    this.zoom = zoom;
    for (const chart of this.charts) chart.soon();
  }
}

export class Chart {
  // form: number -> text for the vertical axis. smooth, log: whether there are such switches;
  // zero: whether the vertical axis begins there.
  constructor(place, group, { title, unit, form, smooth = false, log = false, zero = false }) {
    Object.assign(this, { place, group, form, zero, lines: [], key: "", layout: "" });
    this.smooth = this.switch("smooth", smooth, smooth);
    this.log = this.switch("log", log, false);
    this.whole = element("button", { type: "button", hidden: "" }, "whole run");
    this.whole.addEventListener("click", () => group.zoomTo(null));
    this.caption = element("span");
    this.said = element("span", { class: "sr", role: "status" });
    this.area = element("div", { class: "plot", role: "img", tabindex: "0" });
    this.levels = element("small");
    this.values = element("div", { class: "values", hidden: "" });
    this.name(title, unit);
    place.append(element("figure", {}, element("figcaption", {}, this.caption,
      element("span", { class: "switches" }, this.whole, this.log.button, this.smooth.button)),
    this.area, this.levels, this.said));
    this.area.addEventListener("keydown", (event) => this.press(event));
    this.area.addEventListener("blur", () => this.leave());
    group.charts.push(this);
    new ResizeObserver(() => this.soon()).observe(this.area);
    new IntersectionObserver(([entry]) => {
      this.seen = entry.isIntersecting;
      if (this.seen && waiting.has(this)) this.soon();
    }, { rootMargin: "100px" }).observe(place);
    addEventListener("theme", () => this.plot?.redraw(false));
  }

  switch(name, there, on) {
    const button = element("button", { type: "button", "aria-pressed": String(on) }, name);
    button.hidden = !there;
    const state = { on, button };
    button.addEventListener("click", () => {
      state.on = !state.on;
      button.setAttribute("aria-pressed", String(state.on));
      this.key = this.drawnKey = "";
      this.update(this.lines);
    });
    return state;
  }

  name(title, unit) {
    this.title = title;
    setText(this.caption, `${title} (${unit})`);
    if (!this.plot) this.area.setAttribute("aria-label", title);
  }

  // lines: [{name, look, version, x, every, mean, low, high}]; look is a number that stays with its
  // name, or "level" for what is constant.
  update(lines) {
    const key = lines.map((line) => `${line.name}\n${line.look}\n${line.version}\n${line.x.length}`).join("\n\n");
    if (key === this.key) return;
    this.key = key;
    this.lines = lines;
    this.soon();
  }

  soon() {
    waiting.add(this);
    if (this.seen) drawSome();
  }

  draw() {
    const width = this.area.clientWidth;
    if (!width) return;
    if (this.plot && this.key === this.drawnKey && this.plot.width === width) {
      this.rescale();
      return;
    }
    this.drawnKey = this.key;
    const lines = this.lines.filter((line) => line.mean.some((value) => value !== null));
    if (!lines.length) {
      this.drop();
      setText(this.area, "nothing yet");
      this.area.setAttribute("aria-label", `${this.title}: nothing yet`);
      return;
    }
    const levels = lines.filter((line) => line.look === "level").map((line) => `${line.name} ${this.form(line.mean[0])}`);
    setText(this.levels, levels.length ? `dashed: ${levels.join(", ")}` : "");
    const parts = lines.map((line) => this.parts(line));
    const layout = JSON.stringify([this.log.on, lines.map((line, i) => [line.name, line.look, parts[i].length])]);
    const data = joined(parts.map((columns, i) => [lines[i].x, ...columns]), this.log.on);
    this.drawn = lines;
    if (layout !== this.layout) {
      this.drop();
      setText(this.area, "");
      this.layout = layout;
      this.plot = new uPlot(this.options(lines, parts, width), data, this.area);
      this.plot.over.append(this.values);
      touches(this.plot.over);
    } else {
      this.plot.setData(data, false);
    }
    if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
    this.rescale(true);
    const newest = lines.map((line) => `${line.name} ${this.form(line.mean.findLast((value) => value !== null))}`);
    this.area.setAttribute("aria-label",
      `${this.title}. Newest: ${newest.slice(0, MOST_VALUES).join(", ")}. Arrow keys move along it.`);
  }

  drop() {
    this.plot?.destroy();
    this.plot = null;
    this.layout = "";
  }

  // What is drawn of a line: what is followed by the eye first, then what lies behind it.
  parts(line) {
    const smooth = this.smooth.on && line.mean.length > 8;
    const main = smooth ? smoothed(line.mean) : line.mean;
    if (line.every > 1) return [main, line.low, line.high];
    return smooth ? [main, line.mean] : [main];
  }

  options(lines, parts, width) {
    const [series, bands] = [[{}], []];
    const [behind, edge] = [opaque(0.22 / Math.sqrt(lines.length)), opaque(0.4 / Math.sqrt(lines.length))];
    this.mains = [];
    lines.forEach((line, i) => {
      const alone = line.x.length === 1;
      this.mains.push(series.length);
      series.push({
        stroke: () => colourOf(line.look), width: 2, dash: dashOf(line.look), spanGaps: true,
        points: { show: alone ? true : undefined, size: 5 },
      });
      const shaded = parts[i].length === 3;
      const edged = shaded && lines.length > MOST_EDGED ? 0 : 1; // many edges take long to draw
      if (shaded) bands.push({ series: [series.length + 1, series.length], fill: () => colourOf(line.look) + behind });
      for (let more = 1; more < parts[i].length; more += 1) {
        series.push({ stroke: () => colourOf(line.look) + edge, width: edged, spanGaps: true, points: { show: false } });
      }
    });
    const axis = { font: FONT, stroke: () => css("--dim"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false } };
    return {
      width, height: HEIGHT, series, bands, padding: [8, RIGHT, 0, 0], legend: { show: false },
      scales: {
        x: { time: false, range: (_, low, high) => (low === null ? [0, 1] : low === high ? [low, low + 1] : [low, high]) },
        y: this.log.on ? { distr: 3 } : { range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        { ...axis, size: 28, incrs: WHOLE_STEPS, values: (_, splits) => splits.map(short) },
        { ...axis, size: widest, ...(this.form === bytes && !this.log.on ? { incrs: POWERS_OF_2 } : {}), values: (_, splits) => splits.map((value) => (value === null ? "" : this.form(value))) },
      ],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false },
        points: { size: 7, show: (_, index) => (this.mains.includes(index) ? element("div") : false) },
        sync: { key: this.group.key, setSeries: false, filters: { pub: (kind) => kind.startsWith("mousemove") || kind === "mouseleave" } },
        bind: { dblclick: () => () => { this.group.zoomTo(null); return null; } },
      },
      hooks: { setSelect: [() => this.select()], setCursor: [() => this.hover()] },
    };
  }

  range(low, high) {
    if (low === null) return [0, 1];
    const bottom = this.zero ? Math.min(0, low) : low;
    const room = 0.04 * (high - bottom) || Math.abs(high) || 1;
    return [this.zero && bottom === 0 ? 0 : bottom - room, high + room];
  }

  rescale(changed = false) {
    this.whole.hidden = !this.group.zoom;
    if (!this.plot) return;
    const xs = this.plot.data[0];
    const [min, max] = this.group.zoom ?? [xs[0], xs.at(-1)];
    const x = this.plot.scales.x;
    if (x.min === min && x.max === max && !changed) return;
    this.plot.batch(() => {
      this.plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      this.plot.setScale("x", { min, max });
    });
  }

  select() {
    const { left, width } = this.plot.select;
    if (width < LEAST_DRAG) return;
    this.group.zoomTo([this.plot.posToVal(left, "x"), this.plot.posToVal(left + width, "x")]);
  }

  // The values where the pointer is, beside it.
  hover() {
    const { plot, values } = this;
    const { left, idx } = plot?.cursor ?? {};
    const here = plot && (plot.over.matches(":hover") || document.activeElement === this.area);
    values.hidden = !here || idx === null || idx === undefined || left < 0;
    if (values.hidden) return;
    const rows = this.at(idx).slice(0, MOST_VALUES).map(({ line, text }) => {
      const mark = element("i");
      mark.style.background = colourOf(line.look);
      return element("div", {}, mark, `${line.name} ${text}`);
    });
    values.replaceChildren(element("b", {}, this.group.named(plot.data[0][idx])), ...rows);
    const right = left > plot.over.clientWidth / 2;
    values.style.left = right ? "" : `${left + 12}px`;
    values.style.right = right ? `${plot.over.clientWidth - left + 12}px` : "";
  }

  // What every line says at an index of the data.
  at(idx) {
    const x = this.plot.data[0][idx];
    return this.drawn.map((line) => {
      const near = nearest(line.x, x);
      const [mean, low, high] = [line.mean[near], line.low[near], line.high[near]];
      if (mean === null) return { line, text: "-" };
      return { line, text: this.form(mean) + (low < high ? ` (${this.form(low)} to ${this.form(high)})` : "") };
    });
  }

  press(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity, Escape: NaN }[event.key];
    if (by === undefined || !this.plot) return;
    event.preventDefault();
    if (Number.isNaN(by)) { this.group.zoomTo(null); return; }
    const xs = this.plot.data[0];
    const last = this.index ?? xs.length;
    this.index = Math.max(0, Math.min(xs.length - 1, last + by));
    this.plot.setCursor({ left: this.plot.valToPos(xs[this.index], "x"), top: 20 });
    const said = this.at(this.index).slice(0, 4).map(({ line, text }) => `${line.name} ${text}`);
    setText(this.said, `at ${this.group.named(xs[this.index])}: ${said.join(", ")}`);
  }

  leave() {
    this.index = undefined;
    this.values.hidden = true;
    this.plot?.setCursor({ left: -10, top: -10 });
  }
}

let drawing = false;

// One chart a frame.
function drawSome() {
  if (drawing) return;
  const chart = [...waiting].find((one) => one.seen);
  if (!chart) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    waiting.delete(chart);
    chart.draw();
    drawSome();
  });
}

function joined(tables, log) {
  const [x, ...others] = tables.map((table) => table[0]);
  const alike = others.every((other) => other.length === x.length && other.every((value, i) => value === x[i]));
  const data = alike ? [x, ...tables.flatMap((table) => table.slice(1))] : uPlot.join(tables);
  if (!log) return data;
  return [data[0], ...data.slice(1).map((column) => column.map((value) => (value <= 0 ? null : value)))];
}

function widest(plot, values, index, cycle) {
  const axis = plot.axes[index];
  if (cycle > 1) return axis._size;
  plot.ctx.font = axis.font[0];
  const widths = (values ?? []).map((value) => plot.ctx.measureText(value).width / uPlot.pxRatio);
  return Math.ceil(Math.max(0, ...widths) + axis.gap + 6);
}

// A finger that moves sideways does what a mouse does; up and down it scrolls.
function touches(over) {
  const kinds = { pointerdown: "mousedown", pointermove: "mousemove", pointerup: "mouseup", pointercancel: "mouseup" };
  for (const [kind, mouse] of Object.entries(kinds)) {
    over.addEventListener(kind, (event) => {
      if (event.pointerType !== "touch") return;
      const { clientX, clientY } = event;
      const target = mouse === "mouseup" ? document : over;
      // uPlot passes over moves by 0.
      target.dispatchEvent(new MouseEvent(mouse, { clientX, clientY, movementX: 1, button: 0, bubbles: true }));
    });
  }
}

export function colourOf(look) {
  return look === "level" ? css("--dim") : css(`--c${look % COLOURS}`);
}

export function dashOf(look) {
  return look === "level" ? [6, 4] : DASHES[Math.floor(look / COLOURS) % DASHES.length];
}

// A share of 1 as the two digits behind a colour.
function opaque(share) {
  return Math.max(5, Math.round(255 * share)).toString(16).padStart(2, "0");
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function short(value) {
  if (value === null) return "";
  for (const [limit, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= limit) return `${Number((value / limit).toPrecision(4))}${unit}`;
  }
  return String(value);
}

function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle; else high = middle;
  }
  return Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}
