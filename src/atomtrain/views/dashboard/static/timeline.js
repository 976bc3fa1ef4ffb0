// A step as bars: one row a stream, coloured by phase; what was measured above what was predicted.

import { element, key, seconds, shape } from "./format.js";

const ROWS = {
  load: "load parameters", fetch: "fetch values", compute: "compute", save: "save values",
  unload: "unload gradients", read: "read (disk)", update: "update (host)",
  write: "write (disk)", averaging: "averaging",
};
const PHASES = { forward: "forward", turn: "turn: forward and backward of the last segment", backward: "backward" };
const ROW = 30;
const LEFT = 130;
const RIGHT = 52;
const BOTTOM = 26;

// spans: [[stream, label, start_s, end_s], ...] from any common zero; returns a figure.
export function timeline(title, spans, width) {
  const kept = spans.filter(([, , start, end]) => end > start);
  const zero = Math.min(...kept.map((span) => span[2]));
  const length = Math.max(...kept.map((span) => span[3])) - zero;
  const names = [...new Set(kept.map((span) => span[0]))];
  const rows = [...Object.keys(ROWS).filter((row) => names.includes(row)), ...names.filter((name) => !(name in ROWS))];
  const height = rows.length * ROW + BOTTOM;
  const inner = Math.max(100, width - LEFT - RIGHT);
  const x = (at) => LEFT + (inner * (at - zero)) / length;
  const busy = rows.map((row) => covered(kept.filter((span) => span[0] === row)) / length);
  const said = rows.map((row, i) => `${ROWS[row] ?? row} ${(100 * busy[i]).toFixed(0)}% busy`).join(", ");
  const svg = shape("svg", {
    role: "img", viewBox: `0 0 ${width} ${height}`, height,
    "aria-label": `${title}: ${seconds(length)}. ${said}.`,
  });
  for (const value of ticks(0, length, Math.max(2, Math.floor(inner / 110)))) {
    const at = x(zero + value);
    svg.append(shape("line", { class: "grid", x1: at, x2: at, y1: 0, y2: height - BOTTOM }),
      shape("text", { x: at, y: height - 8, "text-anchor": "middle" }, seconds(value)));
  }
  const shades = shadesOf(kept);
  rows.forEach((row, index) => {
    const top = index * ROW + 4;
    svg.append(shape("text", { x: LEFT - 8, y: top + 15, "text-anchor": "end" }, ROWS[row] ?? row),
      shape("text", { x: width - RIGHT + 6, y: top + 15 }, `${(100 * busy[index]).toFixed(0)}%`));
    for (const [, label, start, end] of kept.filter((span) => span[0] === row)) {
      svg.append(shape("rect", {
        class: colour(row, label, shades), x: x(start), y: top, height: ROW - 8,
        width: Math.max(0.6, x(end) - x(start)),
      }, shape("title", {}, `${label}: ${seconds(end - start)}, from ${seconds(start - zero)}`)));
    }
  });
  return element("figure", {}, element("figcaption", {}, `${title}: ${seconds(length)}`), svg, details(rows, kept, busy));
}

export function timelineKey(withAveraging) {
  const keys = Object.entries(PHASES).map(([phase, name]) => key(`f-${phase}`, name));
  if (withAveraging) keys.push(key("f-average", "averaging with other peers"));
  return element("div", {}, ...keys);
}

// The same in figures, for readers who do not see the picture.
function details(rows, spans, busy) {
  const body = rows.map((row, index) => {
    const own = spans.filter((span) => span[0] === row);
    const total = own.reduce((sum, span) => sum + span[3] - span[2], 0);
    return element("tr", {}, element("th", { scope: "row" }, ROWS[row] ?? row),
      element("td", {}, String(own.length)), element("td", {}, seconds(total)),
      element("td", {}, `${(100 * busy[index]).toFixed(0)}%`));
  });
  const head = ["stream", "pieces", "time", "busy"].map((name) => element("th", { scope: "col" }, name));
  return element("details", {}, element("summary", {}, "in figures"),
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)));
}

function covered(spans) {
  let [sum, reached] = [0, -Infinity];
  for (const [, , start, end] of [...spans].sort((a, b) => a[2] - b[2])) {
    sum += Math.max(0, end - Math.max(start, reached));
    reached = Math.max(reached, end);
  }
  return sum;
}

// Neighbours on the compute stream differ in shade, so that one segment ends visibly.
function shadesOf(spans) {
  const [shades, seen] = [new Map(), new Map()];
  const order = [...spans].sort((a, b) => (a[0] !== "compute") - (b[0] !== "compute") || a[2] - b[2]);
  for (const [, label] of order) {
    if (shades.has(label)) continue;
    const phase = label.split(" ")[0];
    shades.set(label, (seen.get(phase) ?? 0) % 2);
    seen.set(phase, (seen.get(phase) ?? 0) + 1);
  }
  return shades;
}

function colour(row, label, shades) {
  if (row === "averaging") return "f-average";
  const phase = label.split(" ")[0];
  return `f-${phase in PHASES ? phase : "other"}${shades.get(label) ? "-2" : ""}`;
}

function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}
