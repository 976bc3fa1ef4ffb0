// The page: takes in the stream of events, and draws what is in sight at most a few times a second.

import * as form from "./format.js";
import { LineChart } from "./chart.js";
import { memoryMap } from "./memory.js";
import { PeerTable, RoundList } from "./swarm.js";
import { timeline, timelineKey } from "./timeline.js";

const PAGES = ["run", "timeline", "memory", "swarm", "plan"];
const DRAW_MS = 200;
const MOST_MESSAGES = 100;
const MOST_STEPS = 4000;
const at = (id) => document.getElementById(id);
const peers = new Map();
let pending = false;
let page = "run";
let drawn = "";

const charts = {
  loss: new LineChart(at("chart-loss"), {
    title: "Training loss", unit: "nats per token", form: (y) => form.decimal(y), formX: (x) => `step ${form.count(x)}`, smooth: true,
  }),
  heldOut: new LineChart(at("chart-held-out"), {
    title: "Held-out", unit: "bits per byte", form: (y) => form.decimal(y), formX: (x) => `step ${form.count(x)}`,
  }),
  speed: new LineChart(at("chart-speed"), {
    title: "Speed", unit: "tokens/s", form: form.count, formX: (x) => `step ${form.count(x)}`, smooth: true, zero: true,
  }),
  step: new LineChart(at("chart-step"), {
    title: "Step, measured and predicted", unit: "time", form: form.seconds, formX: (x) => `step ${form.count(x)}`, smooth: true, zero: true,
  }),
};
const table = new PeerTable(at("peers"));
const rounds = new RoundList(at("rounds"), at("pairs"));

class Peer {
  constructor(name) {
    this.name = name;
    this.newest = {};
    this.steps = [];
    this.evaluations = [];
    this.rounds = [];
    this.messages = [];
  }

  apply(event) {
    const kind = event.event;
    if (kind === "step") {
      dropFrom(this.steps, event.step);
      dropFrom(this.evaluations, event.step);
      this.steps.push(event);
      if (this.steps.length > MOST_STEPS) this.steps = this.steps.filter((_, i, all) => i % 2 === 0 || i === all.length - 1);
    } else if (kind === "evaluation") {
      dropFrom(this.evaluations, event.step);
      this.evaluations.push(event);
    } else if (kind === "round") {
      this.rounds.push(event);
      if (this.rounds.length > 200) this.rounds.shift();
    }
    if (kind === "run_started") { delete this.newest.run_finished; delete this.newest.peer_lost; }
    this.newest[kind] = event;
    const text = said(event);
    if (text) {
      this.messages.push({ time: event.time_s, text, warning: kind === "warning" });
      this.messages.sort((a, b) => a.time - b.time);
      if (this.messages.length > MOST_MESSAGES) this.messages.shift();
    }
  }

  get state() {
    if (this.newest.run_finished) return this.newest.run_finished.reason ?? "finished";
    if (this.newest.peer_lost) return "lost";
    return this.steps.length ? "training" : "starting";
  }
}

function dropFrom(events, step) {
  while (events.length && events.at(-1).step >= step) events.pop();
}

function said(event) {
  switch (event.event) {
    case "evaluation": return event.bits_per_byte === undefined
      ? `held-out loss ${form.decimal(event.loss)} at step ${event.step}`
      : `held-out bits per byte ${form.decimal(event.bits_per_byte)} at step ${event.step}`;
    case "checkpoint": return `checkpoint at step ${event.step}, ${form.bytes(event.bytes)}`;
    case "sample": return `“${event.prompt}” → ${event.text}`;
    case "warning": return `warning: ${event.message}`;
    case "membership": {
      const joined = event.joined?.length ? `, joined: ${event.joined.join(" ")}` : "";
      return `${event.peers} peers${joined}${event.left?.length ? `, left: ${event.left.join(" ")}` : ""}`;
    }
    case "run_finished": return `run ${event.reason} at step ${event.step}`;
    case "peer_lost": return `lost: ${event.reason}`;
    default: return null;
  }
}

function listen() {
  const stream = new EventSource("/stream");
  stream.addEventListener("start", (message) => {
    const { title } = JSON.parse(message.data);
    form.setText(at("title"), title);
    document.title = `ATOM ${title}`;
    peers.clear();
    table.apply({ rows: [], gone: [...table.rows.keys()], time_s: 0 });
  });
  stream.addEventListener("events", (message) => {
    const { peer, events } = JSON.parse(message.data);
    if (!peers.has(peer)) addPeer(peer);
    for (const event of events) peers.get(peer).apply(event);
    drawSoon();
  });
  stream.addEventListener("swarm", (message) => {
    table.apply(JSON.parse(message.data));
    drawSoon();
  });
  stream.addEventListener("ready", () => {
    form.setText(at("connection"), "live");
    // A swarm that is seen from outside has a table of peers, and no run to show.
    const runs = [...peers.values()].some((peer) => peer.newest.run_started);
    if (!runs && table.rows.size && !location.hash) location.hash = "swarm";
  });
  stream.onerror = () => form.setText(at("connection"), "connection lost, trying again");
}

function addPeer(name) {
  peers.set(name, new Peer(name));
  const select = at("peer");
  const chosen = select.value;
  select.replaceChildren(...[...peers.keys()].sort(byName).map((one) => form.element("option", { value: one }, one)));
  if (chosen) select.value = chosen;
}

function byName(a, b) {
  return a.localeCompare(b, undefined, { numeric: true });
}

function drawSoon() {
  if (pending) return;
  pending = true;
  setTimeout(() => { pending = false; draw(); }, DRAW_MS);
}

function draw() {
  const peer = peers.get(at("peer").value);
  if (page === "swarm") drawSwarm(peer);
  else if (!peer) return;
  else if (page === "run") drawRun(peer);
  else if (page === "timeline") drawTimeline(peer);
  else if (page === "memory") drawMemory(peer);
  else drawPlan(peer);
}

function drawRun(peer) {
  const step = peer.steps.at(-1) ?? {};
  const plan = peer.newest.plan ?? {};
  const started = peer.newest.run_started ?? {};
  const heldOut = heldOutIn([...peers.values()]);
  form.setFacts(at("cards"), [
    ["state", peer.state],
    ["step", step.step === undefined ? "-" : `${step.step} of ${step.steps}`],
    ["loss", form.decimal(step.loss)],
    [`held-out ${heldOut.short}`, form.decimal(peer.evaluations.at(-1)?.[heldOut.field])],
    ["tokens/s", form.count(step.tokens_per_s)],
    ["time left", peer.state === "training" ? form.seconds(step.time_left_s) : "-"],
    ["step, measured", form.seconds(step.step_s)],
    ["step, predicted", form.seconds(plan.predicted_step_s)],
    ["device peak of budget", `${form.bytes(step.device_peak_bytes)} of ${form.bytes(step.device_budget_bytes)}`],
    ["waiting for the link", form.percent(step.link_wait_share)],
    ["model", `${started.model ?? "-"}, ${form.count(started.parameters)} parameters`],
    ["peers", form.count(step.peers)],
  ]);
  const all = [...peers.values()].filter((one) => one.steps.length).sort((a, b) => byName(a.name, b.name));
  const of = (events, field) => events.map((event) => [event.step, event[field]]);
  charts.loss.update(all.map((one) => ({ name: one.name, points: of(one.steps, "loss") })));
  charts.heldOut.name("Held-out", heldOut.unit);
  charts.heldOut.update(all.map((one) => ({ name: one.name, points: of(one.evaluations, heldOut.field) })));
  charts.speed.update(all.map((one) => ({ name: one.name, points: of(one.steps, "tokens_per_s") })));
  charts.step.update(
    [{ name: `${peer.name} measured`, points: of(peer.steps, "step_s") }],
    { name: "predicted", y: plan.predicted_step_s },
  );
  drawMessages(peer);
}

// Bits per byte compare whatever the tokenizer, where there is text; else the loss is what there is.
function heldOutIn(all) {
  const evaluations = all.flatMap((one) => one.evaluations);
  const bits = !evaluations.length || evaluations.some((event) => form.isNumber(event.bits_per_byte));
  return bits
    ? { field: "bits_per_byte", short: "bits/byte", unit: "bits per byte" }
    : { field: "loss", short: "loss", unit: "loss" };
}

function drawMessages(peer) {
  const last = peer.messages.at(-1);
  const state = `${peer.name} ${peer.messages.length} ${last?.time} ${last?.text}`;
  if (at("messages").dataset.state === state) return;
  at("messages").dataset.state = state;
  at("messages").replaceChildren(...[...peer.messages].reverse().map((message) => form.element(
    "li", { class: message.warning ? "warning" : "" },
    form.element("time", {}, form.clock(message.time)), message.text)));
}

function drawTimeline(peer) {
  const event = peer.newest.timeline;
  if (!event) {
    form.setText(at("timeline-note"), "No step has been recorded yet: the second one is, and then the last one before each evaluation.");
    at("timelines").replaceChildren();
    return;
  }
  const width = at("timelines").clientWidth;
  const during = peer.rounds.filter((round) => round.time_s > event.start_time_s
    && round.time_s - round.duration_s < event.start_time_s + event.step_s);
  const state = `timeline ${peer.name} ${event.time_s} ${width} ${during.length}`;
  if (drawn === state) return;
  drawn = state;
  form.setText(at("timeline-note"), `Step ${event.step} of ${peer.name}: measured ${form.seconds(event.step_s)}, predicted ${form.seconds(event.predicted_step_s)}. The share on the right is how long each stream was busy.`);
  const zero = Math.min(...event.measured.map((span) => span[2]));
  const averaging = during.map((round) => {
    const end = round.time_s - event.start_time_s;
    return ["averaging", `round ${round.round}`, zero + Math.max(0, end - round.duration_s), zero + Math.min(event.step_s, end)];
  });
  const figures = [timelineKey(averaging.length > 0)];
  if (event.measured.length) figures.push(timeline(`Measured: step ${event.step}`, event.measured.concat(averaging), width));
  if (event.predicted.length) figures.push(timeline("Predicted", event.predicted, width));
  at("timelines").replaceChildren(...figures);
}

function drawMemory(peer) {
  const plan = peer.newest.plan;
  const width = at("memory").clientWidth;
  const state = `memory ${peer.name} ${plan?.time_s} ${width}`;
  if (drawn === state) return;
  drawn = state;
  const regions = plan?.memory ?? [];
  form.setText(at("memory-note"), regions.length
    ? `As the plan of ${peer.name} lays it out; segments from the first layer to the last.`
    : "The plan of this peer has no memory map.");
  at("memory").replaceChildren(...memoryMap(regions, width));
}

function drawSwarm(peer) {
  table.draw();
  form.setText(at("swarm-note"), table.rows.size ? table.summary() : "This run has no swarm: its peers tell nothing about others.");
  const own = peer?.rounds ?? [];
  const state = `swarm ${peer?.name} ${own.length} ${own.at(-1)?.time_s}`;
  if (drawn === state) return;
  drawn = state;
  form.setText(at("rounds-note"), own.length ? `Rounds that ${peer.name} took part in, newest first.` : "No rounds yet, as far as is known here.");
  rounds.draw(own);
}

function drawPlan(peer) {
  const plan = peer.newest.plan ?? {};
  const started = peer.newest.run_started ?? {};
  form.setFacts(at("plan-facts"), [
    ["device", started.device ?? "-"],
    ["segments", form.count(plan.segments)],
    ["step, predicted", form.seconds(plan.predicted_step_s)],
    ["device peak, predicted", form.bytes(plan.predicted_device_peak_bytes)],
    ["host", form.bytes(plan.host_bytes)],
    ["bound by", plan.bound ?? "-"],
  ]);
  form.setText(at("plan-text"), plan.text ?? "No plan yet.");
}

function show() {
  const wanted = location.hash.slice(1);
  page = PAGES.includes(wanted) ? wanted : "run";
  drawn = "";
  for (const name of PAGES) {
    at(`page-${name}`).hidden = name !== page;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  draw();
}

function themes() {
  const button = at("theme");
  const order = ["system", "light", "dark"];
  let chosen = localStorage.getItem("theme") ?? "system";
  const apply = () => {
    if (chosen === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    form.setText(button, `Theme: ${chosen}`);
  };
  button.addEventListener("click", () => {
    chosen = order[(order.indexOf(chosen) + 1) % order.length];
    localStorage.setItem("theme", chosen);
    apply();
  });
  apply();
}

themes();
addEventListener("hashchange", show);
addEventListener("resize", drawSoon);
at("peer").addEventListener("change", () => { drawn = ""; draw(); });
show();
listen();
