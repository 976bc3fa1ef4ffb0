// Peers as marks: to the right what their links leave free, upwards how fast they train. Each kind
// of mark is one path, however many peers have it.

import { count, element, isNumber, key, rate, setText, shape } from "./format.js";

const KINDS = {
  direct: ["reached directly", (x, y) => `M${x - 5} ${y}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z`],
  relayed: ["through a relay", (x, y) => `M${x - 4} ${y - 4}h8v8h-8z`],
  self: ["this peer", (x, y) => `M${x} ${y - 7}l7 7l-7 7l-7 -7z`],
  gone: ["unreachable", (x, y) => `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`],
};
const HEIGHT = 260;
const LEFT = 64;
const RIGHT = 24;
const TOP = 24;
const BOTTOM = 46;
const MOST_NAMED = 12;
const MOST_LETTERS = 24;
const NEAR = 24;
const MOST_NEAR = 3;

export class PeerMap {
  constructor(place, note) {
    Object.assign(this, { place, note, marks: [], drawn: "" });
    this.svg = shape("svg", { role: "img", height: HEIGHT });
    const keys = Object.entries(KINDS).map(([kind, [name]]) => key(`m-${kind}`, name));
    place.append(element("div", {}, ...keys), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.tell(event));
    this.svg.addEventListener("pointerleave", () => this.tellAll());
  }

  // rows: of the swarm's table; kindOf: says which kind of mark a row has.
  draw(rows, kindOf) {
    const known = rows.filter((row) => row.free_bytes_per_s > 0 && row.tokens_per_s > 0
      && isNumber(row.free_bytes_per_s) && isNumber(row.tokens_per_s));
    this.place.hidden = known.length < 2;
    this.silent = rows.length - known.length;
    const width = this.place.clientWidth;
    if (this.place.hidden || !width) {
      setText(this.note, known.length < 2 ? "Fewer than two peers tell both their rates." : "");
      return;
    }
    const drawn = JSON.stringify([width, this.silent, known.map((row) => [
      row.name, row.free_bytes_per_s, row.tokens_per_s, kindOf(row)])]);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const across = scale(known.map((row) => 8 * row.free_bytes_per_s), LEFT, width - RIGHT);
    const upwards = scale(known.map((row) => row.tokens_per_s), HEIGHT - BOTTOM, TOP);
    this.marks = known.map((row) => ({
      x: across.at(8 * row.free_bytes_per_s), y: upwards.at(row.tokens_per_s), kind: kindOf(row), row,
    }));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", `${known.length} peers by the free rate of their links and tokens a second; the table has the values.`);
    this.svg.replaceChildren(...this.grid(across, upwards, width), ...this.paths(), ...this.names(width));
    this.tellAll();
  }

  grid(across, upwards, width) {
    const bottom = HEIGHT - BOTTOM;
    return [
      ...across.ticks((width - LEFT - RIGHT) / 90).flatMap((value) => [
        shape("line", { class: "grid", x1: across.at(value), x2: across.at(value), y1: TOP, y2: bottom }),
        shape("text", { x: across.at(value), y: bottom + 16, "text-anchor": "middle" }, rate(value / 8)),
      ]),
      ...upwards.ticks(6).flatMap((value) => [
        shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: upwards.at(value), y2: upwards.at(value) }),
        shape("text", { x: LEFT - 8, y: upwards.at(value) + 4, "text-anchor": "end" }, count(value)),
      ]),
      shape("text", { x: width - RIGHT, y: HEIGHT - 8, "text-anchor": "end" }, "link free"),
      shape("text", { x: LEFT - 8, y: TOP - 10, "text-anchor": "end" }, "tokens/s"),
    ];
  }

  paths() {
    return Object.entries(KINDS).map(([kind, [, outline]]) => shape("path", {
      class: `m-${kind}`,
      d: this.marks.filter((mark) => mark.kind === kind)
        .map(({ x, y }) => outline(Math.round(x), Math.round(y))).join(""),
    }));
  }

  // Of few peers the names stand there, each on the side where there is room.
  names(width) {
    if (this.marks.length > MOST_NAMED) return [];
    return this.marks.map(({ x, y, row }) => {
      const left = x > width / 2;
      return shape("text", { x: left ? x - 10 : x + 10, y: y + 4, "text-anchor": left ? "end" : "start" }, String(row.name).slice(0, MOST_LETTERS));
    });
  }

  tell(event) {
    const { left, top } = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    const near = this.marks.map((mark) => [Math.hypot(mark.x - x, mark.y - y), mark.row])
      .filter(([far]) => far < NEAR).sort(([a], [b]) => a - b);
    if (!near.length) {
      this.tellAll();
      return;
    }
    const said = near.slice(0, MOST_NEAR).map(([, row]) => `${row.name}: ${rate(row.free_bytes_per_s)}, ${count(row.tokens_per_s)} tokens/s`);
    const more = near.length - said.length;
    setText(this.note, said.join("; ") + (more ? `; ${more} more` : ""));
  }

  tellAll() {
    const silent = this.silent ? `; not shown, since they tell no rates: ${this.silent}` : "";
    setText(this.note, `${this.marks.length} peers${silent}.`);
  }
}

// Both axes are logarithmic: peers differ by factors.
function scale(values, from, to) {
  const low = Math.log10(Math.min(...values)) - 0.1;
  const high = Math.log10(Math.max(...values)) + 0.1;
  return {
    at: (value) => from + ((to - from) * (Math.log10(value) - low)) / (high - low),
    ticks(most) {
      const steps = [[1, 2, 5], [1, 3], [1]].find((some) => some.length * (high - low) <= most) ?? [1];
      const found = [];
      for (let power = Math.floor(low); power <= high; power += 1) {
        for (const step of steps) {
          const at = power + Math.log10(step);
          if (at >= low && at <= high) found.push(step * 10 ** power);
        }
      }
      return found.length > 1 ? found : [Math.min(...values), Math.max(...values)];
    },
  };
}
