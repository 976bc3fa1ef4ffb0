// A line chart: raw values light, their running mean strong, one colour and dash a series.
// Pointer and arrow keys move a cursor whose values are read out as text.

import { element, isNumber, setText, shape } from "./format.js";

const HEIGHT = 230;
const MARGIN = { left: 64, right: 12, top: 8, bottom: 26 };
const COLOURS = 7;
const DASHES = ["none", "6 3", "2 3", "8 3 2 3"];
const MOST_POINTS = 1200;

export class LineChart {
  // form: number -> text for the vertical axis; formX: the same for the horizontal one.
  constructor(place, { title, unit, formX, form, smooth = false, zero = false }) {
    Object.assign(this, { formX, form, smooth, zero });
    this.series = [];
    this.level = null;
    this.cursor = null;
    this.readout = element("span", { class: "readout", role: "status" });
    this.svg = shape("svg", { role: "img", tabindex: "0", height: HEIGHT });
    this.keys = element("div");
    this.caption = element("span");
    this.name(title, unit);
    place.append(element("figure", {},
      element("figcaption", {}, this.caption, this.readout), this.svg, this.keys));
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(place);
  }

  name(title, unit) {
    this.title = title;
    setText(this.caption, `${title} (${unit}) `);
  }

  // series: [{name, points: [[x, y], ...]}], by ascending x; level: {name, y} or null.
  update(series, level = null) {
    this.series = series.map((one) => ({ ...one, points: one.points.filter(([, y]) => isNumber(y)) }));
    this.level = level;
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const points = this.series.flatMap((one) => one.points);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren();
    if (!points.length) {
      this.svg.append(shape("text", { x: MARGIN.left, y: HEIGHT / 2 }, "nothing yet"));
      this.svg.setAttribute("aria-label", `${this.title}: nothing yet`);
      return;
    }
    this.scale(points, width);
    this.axes(width);
    this.series.forEach((one, index) => this.line(one, index));
    if (this.level && isNumber(this.level.y)) {
      const y = this.y(this.level.y);
      this.svg.append(shape("line", { class: "level", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
    }
    this.legend();
    const last = this.series.map((one) => `${one.name} ${this.form(one.points.at(-1)?.[1])}`);
    this.svg.setAttribute("aria-label", `${this.title}. Newest: ${last.join(", ")}. Arrow keys move a cursor.`);
    this.showCursor();
  }

  scale(points, width) {
    let [lowX, highX, lowY, highY] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [x, y] of points) {
      lowX = Math.min(lowX, x); highX = Math.max(highX, x);
      lowY = Math.min(lowY, y); highY = Math.max(highY, y);
    }
    if (this.level && isNumber(this.level.y)) {
      lowY = Math.min(lowY, this.level.y); highY = Math.max(highY, this.level.y);
    }
    if (this.zero) lowY = Math.min(0, lowY);
    if (highY === lowY) { highY += Math.abs(highY) || 1; lowY -= this.zero ? 0 : Math.abs(lowY) || 1; }
    if (highX === lowX) highX = lowX + 1;
    this.rangeX = [lowX, highX];
    this.rangeY = [lowY, highY];
    const inner = width - MARGIN.left - MARGIN.right;
    this.x = (x) => MARGIN.left + (inner * (x - lowX)) / (highX - lowX);
    this.unX = (at) => lowX + ((at - MARGIN.left) / inner) * (highX - lowX);
    const tall = HEIGHT - MARGIN.top - MARGIN.bottom;
    this.y = (y) => MARGIN.top + tall * (1 - (y - lowY) / (highY - lowY));
  }

  axes(width) {
    for (const value of ticks(...this.rangeY, 5)) {
      const y = this.y(value);
      this.svg.append(shape("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }),
        shape("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, this.form(value)));
    }
    for (const value of ticks(...this.rangeX, Math.max(2, Math.floor(width / 110)))) {
      const anchor = this.x(value) > width - 40 ? "end" : this.x(value) < MARGIN.left + 20 ? "start" : "middle";
      this.svg.append(shape("text", { x: this.x(value), y: HEIGHT - 8, "text-anchor": anchor }, this.formX(value)));
    }
  }

  line(one, index) {
    const points = thinned(one.points);
    const look = { class: `raw s${index % COLOURS}`, d: this.path(points) };
    if (this.smooth && points.length > 8) {
      this.svg.append(shape("path", look));
      look.d = this.path(running(points, Math.max(2, Math.round(points.length / 60))));
    }
    this.svg.append(shape("path", {
      ...look, class: `mean s${index % COLOURS}`, "stroke-dasharray": DASHES[Math.floor(index / COLOURS) % DASHES.length],
    }));
    if (points.length === 1) {
      const [x, y] = points[0];
      this.svg.append(shape("circle", { class: `s${index % COLOURS}`, cx: this.x(x), cy: this.y(y), r: 2 }));
    }
  }

  path(points) {
    return points.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
  }

  legend() {
    const names = this.series.map((one) => one.name).concat(this.level ? [this.level.name] : []);
    const text = names.join("\n");
    if (this.named === text) return;
    this.named = text;
    this.keys.replaceChildren(...names.slice(0, 12).map((name, index) => {
      const isLevel = index === this.series.length;
      const mark = shape("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" }, shape("line", {
        x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 3,
        class: isLevel ? "level" : `s${index % COLOURS}`,
        "stroke-dasharray": isLevel ? "6 4" : DASHES[Math.floor(index / COLOURS) % DASHES.length],
      }));
      return element("span", { class: "key" }, mark, name);
    }), names.length > 12 ? `and ${names.length - 12} more` : "");
  }

  point(offset) {
    if (this.unX) this.move(this.unX(offset));
  }

  press(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !this.series.some((one) => one.points.length)) return;
    event.preventDefault();
    const xs = [...new Set(this.series.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
    const at = this.cursor === null ? xs.length : nearest(xs, this.cursor);
    this.move(xs[Math.max(0, Math.min(xs.length - 1, at + step))]);
  }

  move(x) {
    this.cursor = x;
    this.showCursor();
  }

  showCursor() {
    this.svg.querySelector(".cursor")?.remove();
    if (this.cursor === null || !this.x) {
      setText(this.readout, "");
      return;
    }
    const said = [];
    let at = null;
    for (const one of this.series) {
      if (!one.points.length) continue;
      const [x, y] = one.points[nearest(one.points.map(([px]) => px), this.cursor)];
      at ??= x;
      said.push(`${one.name} ${this.form(y)}`);
    }
    if (at === null) return;
    const x = this.x(at);
    this.svg.append(shape("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    setText(this.readout, `at ${this.formX(at)}: ${said.slice(0, 4).join(", ")}`);
  }
}

export function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}

function thinned(points) {
  const stride = Math.ceil(points.length / MOST_POINTS);
  return stride <= 1 ? points : points.filter((_, i) => i % stride === 0 || i === points.length - 1);
}

// The mean of the neighbours up to `reach` places to either side, fewer where there are fewer.
function running(points, reach) {
  const sums = [0];
  for (const [, y] of points) sums.push(sums.at(-1) + y);
  return points.map(([x], i) => {
    const near = Math.min(reach, i, points.length - 1 - i);
    return [x, (sums[i + near + 1] - sums[i - near]) / (2 * near + 1)];
  });
}

function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle; else high = middle;
  }
  return Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}
