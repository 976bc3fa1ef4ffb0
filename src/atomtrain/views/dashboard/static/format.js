// Numbers in words, and small helpers for elements. Text always goes in as text, never as markup.

export function bytes(value) {
  if (!isNumber(value)) return "-";
  let scaled = value;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(scaled) < 1024 || unit === "TiB") {
      return unit === "B" ? `${scaled.toFixed(0)} B` : `${scaled.toFixed(1)} ${unit}`;
    }
    scaled /= 1024;
  }
  return "-";
}

export function count(value) {
  if (!isNumber(value)) return "-";
  for (const [limit, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= limit) return `${Number((value / limit).toPrecision(3))}${unit}`;
  }
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3)));
}

export function seconds(value) {
  if (!isNumber(value)) return "-";
  if (value <= 0) return "0 s";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} us`;
  if (value < 1) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 60) return `${value.toFixed(2)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(value / 60);
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function percent(value) {
  if (!isNumber(value)) return "-";
  const hundredths = 100 * value;
  // A thousand peers have less than a per cent each.
  return `${hundredths !== 0 && Math.abs(hundredths) < 1 ? Number(hundredths.toPrecision(2)) : hundredths.toFixed(1)}%`;
}

export function decimal(value, digits = 3) {
  return isNumber(value) ? value.toFixed(digits) : value === undefined || value === null ? "-" : String(value);
}

// A small number, such as a learning rate.
export function small(value) {
  if (!isNumber(value)) return "-";
  if (value === 0 || Math.abs(value) >= 0.01) return String(Number(value.toPrecision(3)));
  return Number(value.toPrecision(2)).toExponential().replace("e-", "e\u2212");
}

export function rate(bytesPerSecond) {
  if (!isNumber(bytesPerSecond) || bytesPerSecond <= 0) return "-";
  return `${count(8 * bytesPerSecond)}bit/s`;
}

export function clock(timeSeconds) {
  return isNumber(timeSeconds) ? new Date(1000 * timeSeconds).toLocaleTimeString() : "";
}

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// What should be a list of texts, but comes from others.
export function texts(value) {
  return Array.isArray(value) ? value.map(String) : [];
}

export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Replaces the entries of a definition list, touching only texts that changed.
export function setFacts(list, facts) {
  const wanted = facts.filter(([, value]) => value !== undefined);
  while (list.children.length > wanted.length) list.lastElementChild.remove();
  wanted.forEach(([name, value], index) => {
    let entry = list.children[index];
    if (!entry) {
      entry = element("div", {}, element("dt"), element("dd"));
      list.append(entry);
    }
    setText(entry.firstElementChild, name);
    setText(entry.lastElementChild, value);
  });
}

// Replaces a table's rows by rows of texts; numbers: indices of the columns of numbers.
export function setRows(body, rows, numbers = []) {
  body.replaceChildren(...rows.map((row) => element("tr", {}, ...row.map((text, i) => element(
    "td", { class: numbers.includes(i) ? "number" : "" }, String(text ?? "-"))))));
}

export function setHead(head, names, numbers = []) {
  head.append(element("tr", {}, ...names.map((name, i) => element(
    "th", { scope: "col", class: numbers.includes(i) ? "number" : "" }, name))));
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// A small square of a colour class beside its name.
export function key(className, name) {
  const mark = shape("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" },
    shape("rect", { x: 0, y: 0, width: 22, height: 10, rx: 2, class: className }));
  return element("span", { class: "key" }, mark, name);
}
