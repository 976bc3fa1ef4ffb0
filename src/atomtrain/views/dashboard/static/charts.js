// Which charts there are, and what each of them draws.

import { Chart, Group } from "./chart.js";
import * as form from "./format.js";

const bySteps = new Group("step", (x) => `step ${x}`);
const byRounds = new Group("round", (x) => `round ${x}`);

// place: id of an element; kind, field: of the curve; levels: what is constant, of the chosen peer.
const OF_RUN = [
  { place: "chart-loss", kind: "step", field: "loss", title: "Training loss", unit: "nats per token", form: form.decimal, smooth: true, log: true },
  { place: "chart-held-out", kind: "evaluation", field: "bits_per_byte", title: "Held-out", unit: "bits per byte", form: form.decimal, log: true },
  { place: "chart-norm", kind: "step", field: "gradient_norm", title: "Gradient norm", unit: "before clipping", form: form.count, smooth: true, log: true },
  { place: "chart-rate", kind: "step", field: "learning_rate", title: "Learning rate", unit: "of each step", form: form.small, log: true },
  { place: "chart-speed", kind: "step", field: "tokens_per_s", title: "Speed", unit: "tokens/s", form: form.count, smooth: true, zero: true },
  { place: "chart-tokens", kind: "step", field: "tokens_total", title: "Tokens seen", unit: "of each peer", form: form.count, zero: true },
  { place: "chart-step", kind: "step", field: "step_s", title: "Step, measured and predicted", unit: "time", form: form.seconds, smooth: true, log: true, zero: true,
    levels: [["predicted", (peer) => peer.newest.plan?.predicted_step_s]] },
];
const OF_MEMORY = [
  { place: "chart-device", kind: "step", field: "device_peak_bytes", title: "Device, most in a step", unit: "measured and planned", form: form.bytes, zero: true,
    levels: [["planned", (peer) => peer.newest.plan?.predicted_device_peak_bytes], ["budget", (peer) => peer.newest.step?.device_budget_bytes]] },
  { place: "chart-host", kind: "step", field: "host_resident_bytes", title: "Host, whole process", unit: "measured; planned without Python and PyTorch", form: form.bytes, zero: true,
    levels: [["planned", (peer) => peer.newest.plan?.host_bytes]] },
];
const OF_SWARM = [
  { place: "chart-round", kind: "round", field: "duration_s", title: "Round", unit: "time", form: form.seconds, zero: true, log: true },
  { place: "chart-sent", kind: "round", field: "bytes_sent", title: "Sent in a round", unit: "bytes", form: form.bytes, zero: true },
  { place: "chart-received", kind: "round", field: "bytes_received", title: "Received in a round", unit: "bytes", form: form.bytes, zero: true },
];
const OF_PUBLIC = OF_RUN.filter((one) => ["loss", "bits_per_byte", "tokens_per_s"].includes(one.field));

export class Charts {
  // which: run, memory, swarm or public.
  constructor(which) {
    const about = { run: OF_RUN, memory: OF_MEMORY, swarm: OF_SWARM, public: OF_PUBLIC }[which];
    const group = which === "swarm" ? byRounds : bySteps;
    this.all = about.map((one) => ({ ...one, chart: new Chart(document.getElementById(one.place), group, one) }));
  }

  // peers: those that are drawn, as {name, look, curves}; chosen: the one whose plan is shown.
  draw(peers, chosen) {
    const heldOut = heldOutIn(peers);
    for (const { kind, field, levels, chart } of this.all) {
      const wanted = kind === "evaluation" ? heldOut.field : field;
      if (kind === "evaluation") chart.name("Held-out", heldOut.unit);
      const lines = peers.map(({ name, look, curves }) => ({ name, look, ...curves[kind].line(wanted) })).filter((line) => line.x?.length);
      for (const [name, of] of chosen ? levels ?? [] : []) lines.push(...level(name, of(chosen), lines));
      chart.update(lines);
    }
  }
}

// Bits per byte compare whatever the tokenizer, where there is text; else the loss is what there is.
export function heldOutIn(peers) {
  const found = peers.map(({ curves }) => curves.evaluation.fields);
  const bits = found.some((fields) => fields.bits_per_byte) || !found.some((fields) => fields.loss);
  return bits
    ? { field: "bits_per_byte", short: "bits/byte", unit: "bits per byte" }
    : { field: "loss", short: "loss", unit: "nats per token" };
}

// A constant as a line over all the others' x.
function level(name, value, lines) {
  if (!form.isNumber(value) || !lines.length) return [];
  const ends = [Math.min(...lines.map((line) => line.x[0])), Math.max(...lines.map((line) => line.x.at(-1)))];
  const x = ends[0] === ends[1] ? [ends[0]] : ends;
  const same = x.map(() => value);
  return [{ name, look: "level", version: `${value} ${ends}`, every: 1, x, mean: same, low: same, high: same }];
}
