// The page that anybody may see: the course of a run, who contributed, what the model says.

import { Charts } from "./charts.js";
import { Curves } from "./curves.js";
import * as form from "./format.js";
import { Legend } from "./legend.js";
import { byName } from "./peers.js";
import { themes } from "./theme.js";

const DRAW_MS = 300;
const at = (id) => document.getElementById(id);
const peers = new Map();
const leaders = new Map();
const samples = new Map();
let pending = false;

const charts = new Charts("public");
const legend = new Legend(at("legend"), () => draw());
form.setHead(at("leaders").tHead, ["rank", "name", "peer", "state", "accepted tokens", "rounds"], [0, 4, 5]);

function listen() {
  const stream = new EventSource("/stream");
  const on = (kind, take) => stream.addEventListener(kind, (message) => {
    take(JSON.parse(message.data));
    drawSoon();
  });
  on("start", ({ title }) => {
    form.setText(at("title"), title);
    document.title = `ATOM ${title}`;
    for (const known of [peers, leaders, samples]) known.clear();
  });
  on("about", (body) => { peerOf(body).about = body; });
  on("curves", (body) => peerOf(body).curves[body.kind].apply(body));
  on("leaders", ({ run, rows }) => leaders.set(run, rows));
  on("samples", ({ run, rows }) => samples.set(run, rows));
  on("ready", () => form.setText(at("connection"), "live"));
  stream.onerror = () => form.setText(at("connection"), "connection lost, trying again");
}

function peerOf({ run, peer }) {
  const key = JSON.stringify([run, peer]);
  if (!peers.has(key)) {
    const curves = { step: new Curves(), evaluation: new Curves(), round: new Curves() };
    peers.set(key, { run, name: peer, about: {}, curves });
  }
  return peers.get(key);
}

function drawSoon() {
  if (pending) return;
  pending = true;
  setTimeout(() => { pending = false; draw(); }, DRAW_MS);
}

function draw() {
  const all = [...peers.values()].sort((a, b) => byName(a.run, b.run) || byName(a.name, b.name));
  const several = new Set(all.map((peer) => peer.run)).size > 1;
  const nameOf = (peer) => (several ? peer.run : peer.name);
  const drawn = all.filter((peer) => peer.curves.step.x.length);
  legend.update([...new Set(drawn.map(nameOf))]);
  charts.draw(drawn.filter((peer) => legend.isOn(nameOf(peer))).map((peer) => ({
    name: several ? `${peer.run}/${peer.name}` : peer.name, look: legend.look(nameOf(peer)), curves: peer.curves,
  })));
  drawCards(all.map((peer) => peer.about));
  drawLeaders(several);
  drawSamples(several);
}

function drawCards(abouts) {
  const farthest = abouts.reduce((a, b) => ((b.step ?? 0) > (a.step ?? 0) ? b : a), {});
  const last = abouts.reduce((a, b) => ((b.ended_s ?? 0) > (a.ended_s ?? 0) ? b : a), {});
  const training = abouts.filter((about) => about.step && !about.ended).length;
  const ended = last.ended ? `${last.ended} at ${form.clock(last.ended_s)}` : "starting";
  form.setFacts(at("cards"), [
    ["state", training ? "training" : ended],
    ["model", `${farthest.model || "-"}, ${form.count(farthest.parameters)} parameters`],
    ["step", form.isNumber(farthest.step) ? `${farthest.step} of ${farthest.steps}` : "-"],
    ["loss", form.decimal(farthest.loss)],
    ["tokens seen here", form.count(abouts.reduce((sum, about) => sum + (about.tokens_total ?? 0), 0))],
  ]);
}

function drawLeaders(several) {
  const rows = [...leaders].flatMap(([run, all]) => all.map((row) => ({ run, ...row })));
  rows.sort((a, b) => (b.accepted_tokens ?? 0) - (a.accepted_tokens ?? 0) || b.rounds - a.rounds);
  at("leaders").parentElement.hidden = !rows.length;
  form.setText(at("leaders-note"), rows.length
    ? "Accepted are the tokens that a contribution stood for in rounds that counted it, as far as this server saw them. Names and states are the peers' own words."
    : "Nobody has contributed to a round yet, as far as is known here.");
  form.setRows(at("leaders").tBodies[0], rows.map((row, i) => [
    i + 1, several ? `${row.run}/${row.name}` : row.name, row.peer, row.state,
    form.count(row.accepted_tokens), row.rounds,
  ]), [0, 4, 5]);
}

function drawSamples(several) {
  const all = [...samples].flatMap(([run, rows]) => rows.map((row) => ({ run, ...row })));
  all.sort((a, b) => (b.time_s ?? 0) - (a.time_s ?? 0));
  form.setText(at("samples-note"), all.length ? "Newest first." : "There are no samples yet: a peer writes some when its run ends.");
  at("samples").replaceChildren(...all.map((one) => form.element("li", {},
    form.element("b", {}, one.prompt), ` ${one.text}`,
    form.element("small", {}, `${several ? `${one.run}/` : ""}${one.peer}, ${form.isNumber(one.step) ? `step ${one.step}, ` : ""}${form.clock(one.time_s)}`))));
}

themes(at("theme"));
listen();
