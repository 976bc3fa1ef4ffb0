// The page: takes in the stream of events, and draws what is in sight at most a few times a second.

import { Charts, heldOutIn } from "./charts.js";
import * as form from "./format.js";
import { Legend } from "./legend.js";
import { memoryMap } from "./memory.js";
import { Runs } from "./peers.js";
import { PeerMap } from "./peer_map.js";
import { Judgements, markOf, PeerTable, RoundList } from "./swarm.js";
import { themes } from "./theme.js";
import { timeline, timelineKey } from "./timeline.js";

const PAGES = ["run", "timeline", "memory", "swarm", "plan"];
const DRAW_MS = 200;
const at = (id) => document.getElementById(id);
const runs = new Runs();
let pending = false;
let page = "run";
let drawn = "";

const charts = { run: new Charts("run"), memory: new Charts("memory"), swarm: new Charts("swarm") };
const legend = new Legend(at("legend"), () => draw());
const table = new PeerTable(at("peers"));
const map = new PeerMap(at("peer-map"), at("map-note"));
const rounds = new RoundList(at("rounds"), at("pairs"));
const judgements = new Judgements(at("judged"), at("judged-note"));

function listen() {
  const stream = new EventSource("/stream");
  const on = (kind, take) => stream.addEventListener(kind, (message) => take(JSON.parse(message.data)));
  on("start", ({ title }) => {
    form.setText(at("title"), title);
    document.title = `ATOM ${title}`;
    runs.clear();
  });
  on("events", (body) => {
    const { peer } = known(body);
    for (const event of body.events) peer.apply(event);
    drawSoon();
  });
  on("curves", (body) => {
    known(body).peer.curves[body.kind].apply(body);
    drawSoon();
  });
  on("swarm", (body) => {
    runs.applyTable(body);
    drawSoon();
  });
  on("ready", () => {
    form.setText(at("connection"), "live");
    // A swarm that is seen from outside has a table of peers, and no run to show.
    const some = [...runs.peers.values()].some((peer) => peer.newest.run_started);
    if (!some && runs.tables.size && !location.hash) location.hash = "swarm";
    drawSoon();
  });
  stream.onerror = () => form.setText(at("connection"), "connection lost, trying again");
}

// Returns the peer that a message is about; a new one is offered for choice.
function known(body) {
  const found = runs.peer(body);
  if (!found.isNew) return found;
  const select = at("peer");
  const chosen = select.value;
  select.replaceChildren(...runs.sorted().map((peer) => form.element("option", { value: JSON.stringify([peer.run, peer.name]) }, runs.label(peer))));
  if (chosen) select.value = chosen;
  return found;
}

function drawSoon() {
  if (pending) return;
  pending = true;
  setTimeout(() => { pending = false; draw(); }, DRAW_MS);
}

// The curves that the legend has on: of each run one colour, or of each peer where there is one run.
function lines() {
  const all = runs.sorted().filter((peer) => Object.values(peer.curves).some((curves) => curves.x.length));
  const nameOf = (peer) => (runs.several ? peer.run : peer.name);
  legend.update([...new Set(all.map(nameOf))]);
  return all.filter((peer) => legend.isOn(nameOf(peer)))
    .map((peer) => ({ name: runs.label(peer), look: legend.look(nameOf(peer)), curves: peer.curves }));
}

function draw() {
  const peer = runs.peers.get(at("peer").value);
  at("legend").hidden = !(page in charts) || legend.names.length < 2;
  charts[page]?.draw(lines(), peer);
  if (page === "swarm") drawSwarm(peer);
  else if (!peer) return;
  else if (page === "run") drawRun(peer);
  else if (page === "timeline") drawTimeline(peer);
  else if (page === "memory") drawMemory(peer);
  else drawPlan(peer);
}

function drawRun(peer) {
  const step = peer.newest.step ?? {};
  const plan = peer.newest.plan ?? {};
  const started = peer.newest.run_started ?? {};
  const heldOut = heldOutIn([peer]);
  form.setFacts(at("cards"), [
    ["state", peer.state],
    ["step", step.step === undefined ? "-" : `${step.step} of ${step.steps}`],
    ["loss", form.decimal(step.loss)],
    [`held-out ${heldOut.short}`, form.decimal(peer.newest.evaluation?.[heldOut.field])],
    ["tokens/s", form.count(step.tokens_per_s)],
    ["time left", peer.state === "training" ? form.seconds(step.time_left_s) : "-"],
    ["step, measured", form.seconds(step.step_s)],
    ["step, predicted", form.seconds(plan.predicted_step_s)],
    ["device peak of budget", `${form.bytes(step.device_peak_bytes)} of ${form.bytes(step.device_budget_bytes)}`],
    ["waiting for the link", form.percent(step.link_wait_share)],
    ["model", `${started.model ?? "-"}, ${form.count(started.parameters)} parameters`],
    ["peers", form.count(step.peers)],
  ]);
  drawMessages(peer);
}

function drawMessages(peer) {
  const last = peer.messages.at(-1);
  const state = `${peer.run} ${peer.name} ${peer.messages.length} ${last?.time} ${last?.text}`;
  if (at("messages").dataset.state === state) return;
  at("messages").dataset.state = state;
  at("messages").replaceChildren(...[...peer.messages].reverse().map((message) => form.element(
    "li", { class: message.warning ? "warning" : "" },
    form.element("time", {}, form.clock(message.time)), message.text)));
}

// Whether something is not drawn yet as `state` tells it.
function isNew(...state) {
  const text = state.join(" ");
  if (drawn === text) return false;
  drawn = text;
  return true;
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
  if (!isNew("timeline", peer.run, peer.name, event.time_s, width, during.length)) return;
  form.setText(at("timeline-note"), `Step ${event.step} of ${runs.label(peer)}: measured ${form.seconds(event.step_s)}, predicted ${form.seconds(event.predicted_step_s)}. The share on the right is how long each stream was busy.`);
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
  if (!isNew("memory", peer.run, peer.name, plan?.time_s, width)) return;
  const regions = plan?.memory ?? [];
  form.setText(at("memory-note"), regions.length
    ? `As the plan of ${runs.label(peer)} lays it out; segments from the first layer to the last.`
    : "The plan of this peer has no memory map.");
  at("memory").replaceChildren(...memoryMap(regions, width));
}

function drawSwarm(peer) {
  const run = peer?.run ?? runs.tables.keys().next().value;
  table.draw(runs.table(run));
  map.draw([...table.rows.values()], markOf);
  form.setText(at("swarm-note"), table.rows.size ? table.summary() : "This run has no swarm: its peers tell nothing about others.");
  const own = peer?.rounds ?? [];
  const ofRun = runs.sorted().filter((one) => one.run === run);
  const judged = ofRun.map((one) => `${one.expelled.length} ${one.rounds.at(-1)?.time_s}`);
  if (!isNew("swarm", run, peer?.name, own.length, own.at(-1)?.time_s, judged)) return;
  form.setText(at("rounds-note"), own.length ? `Rounds that ${runs.label(peer)} took part in, newest first.` : "No rounds yet, as far as is known here.");
  rounds.draw(own);
  judgements.draw(ofRun, table.rows);
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

themes(at("theme"));
addEventListener("hashchange", show);
addEventListener("resize", drawSoon);
at("peer").addEventListener("change", () => { drawn = ""; draw(); });
show();
listen();
