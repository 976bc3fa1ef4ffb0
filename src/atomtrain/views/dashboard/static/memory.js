// Where memory goes: one bar for the host, one for a disk, one for the device, region by region.

import { bytes, element, key, shape } from "./format.js";

const KINDS = {
  parameters: "parameters", gradients: "gradients", optimizer: "optimizer state", slot: "slots",
  gradient: "gradient buffers", resident: "resident blocks", work: "values and workspace",
  waiting: "values that wait, and the rest", free: "free",
};
const HEIGHT = 54;

// regions: [{place, kind, label, bytes}, ...]; returns elements to show.
export function memoryMap(regions, width) {
  return ["host", "disk", "device"].flatMap((place) => {
    const own = regions.filter((region) => region.place === place && region.bytes > 0);
    return own.length ? [bar(place, own, width)] : [];
  });
}

function bar(place, regions, width) {
  const total = regions.reduce((sum, region) => sum + region.bytes, 0);
  const kinds = [...new Set(regions.map((region) => region.kind))];
  const sums = kinds.map((kind) => regions.filter((one) => one.kind === kind).reduce((sum, one) => sum + one.bytes, 0));
  const said = kinds.map((kind, i) => `${KINDS[kind] ?? kind} ${bytes(sums[i])}`).join(", ");
  const svg = shape("svg", {
    role: "img", viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-label": `${place}: ${said}`,
  });
  let at = 0;
  for (const region of regions) {
    const wide = (width * region.bytes) / total;
    svg.append(shape("rect", {
      class: `f-${region.kind}`, x: at, y: 0, width: Math.max(0, wide - (wide > 3 ? 1 : 0)), height: HEIGHT,
    }, shape("title", {}, `${region.label}: ${bytes(region.bytes)}`)));
    at += wide;
  }
  const rows = regions.map((region) => element("tr", {},
    element("td", {}, KINDS[region.kind] ?? region.kind), element("td", {}, region.label),
    element("td", { class: "number" }, bytes(region.bytes))));
  const head = [["what", ""], ["part", ""], ["size", "number"]].map(
    ([name, look]) => element("th", { scope: "col", class: look }, name));
  return element("figure", {},
    element("figcaption", {}, `${place[0].toUpperCase()}${place.slice(1)}: ${bytes(total)}`), svg,
    element("div", {}, ...kinds.map((kind, i) => key(`f-${kind}`, `${KINDS[kind] ?? kind} ${bytes(sums[i])}`))),
    element("details", {}, element("summary", {}, "region by region"),
      element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))));
}
