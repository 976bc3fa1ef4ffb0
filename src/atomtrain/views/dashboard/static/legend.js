// Whose curves are drawn: one button a run, or a peer where there is one run; it switches them on
// and off in all charts, and keeps its colour.

import { colourOf, dashOf } from "./chart.js";
import { element, shape } from "./format.js";

const MOST_ON = 12;

export class Legend {
  // changed: called when something was switched.
  constructor(place, changed) {
    Object.assign(this, { place, changed, names: [], off: new Set(), buttons: new Map() });
    addEventListener("theme", () => this.colour());
  }

  // names: of all that there is, sorted. With many, only the first are on to begin with.
  update(names) {
    if (names.length === this.names.length && names.every((name, i) => name === this.names[i])) return;
    for (const [i, name] of names.entries()) {
      if (!this.buttons.has(name) && i >= MOST_ON) this.off.add(name);
    }
    this.names = names;
    this.place.hidden = names.length < 2;
    this.place.replaceChildren(...names.map((name) => this.button(name)),
      ...(names.length > MOST_ON ? [`${MOST_ON} of ${names.length} are drawn to begin with; press the names of others.`] : []));
    this.colour();
  }

  isOn(name) {
    return !this.off.has(name);
  }

  look(name) {
    return this.names.indexOf(name);
  }

  button(name) {
    if (this.buttons.has(name)) return this.buttons.get(name);
    const mark = shape("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" },
      shape("line", { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 3 }));
    const button = element("button", { type: "button", class: "key", "aria-pressed": String(this.isOn(name)) }, mark, name);
    button.addEventListener("click", () => {
      if (this.isOn(name)) this.off.add(name); else this.off.delete(name);
      button.setAttribute("aria-pressed", String(this.isOn(name)));
      this.changed();
    });
    this.buttons.set(name, button);
    return button;
  }

  colour() {
    for (const name of this.names) {
      const line = this.buttons.get(name).querySelector("line");
      line.style.stroke = colourOf(this.look(name));
      line.style.strokeDasharray = dashOf(this.look(name)).join(" ");
    }
  }
}
