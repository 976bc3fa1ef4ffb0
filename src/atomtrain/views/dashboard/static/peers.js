// What is known of runs and their peers, as the stream tells it.

import { Curves } from "./curves.js";
import { bytes, decimal, texts } from "./format.js";

const MOST_MESSAGES = 100;
const MOST_ROUNDS = 200;

export class Peer {
  constructor(run, name) {
    Object.assign(this, { run, name, newest: {}, rounds: [], messages: [], expelled: [] });
    this.curves = { step: new Curves(), evaluation: new Curves(), round: new Curves() };
  }

  apply(event) {
    const kind = event.event;
    if (kind === "run_started") { delete this.newest.run_finished; delete this.newest.peer_lost; }
    this.newest[kind] = event;
    if (kind === "expelled") this.expelled.push(event);
    if (kind === "round") {
      this.rounds.push(event);
      if (this.rounds.length > MOST_ROUNDS) this.rounds.shift();
    }
    const text = said(event);
    if (!text) return;
    this.messages.push({ time: event.time_s, text, warning: kind === "warning" || kind === "expelled" });
    this.messages.sort((a, b) => a.time - b.time);
    if (this.messages.length > MOST_MESSAGES) this.messages.shift();
  }

  get state() {
    if (this.newest.run_finished) return this.newest.run_finished.reason ?? "finished";
    if (this.newest.peer_lost) return "lost";
    return this.newest.step ? "training" : "starting";
  }
}

// All peers of all runs.
export class Runs {
  constructor() {
    this.clear();
  }

  clear() {
    this.peers = new Map();
    this.tables = new Map();
  }

  // Returns the peer that a message is about; `isNew` tells whether it is the first of it.
  peer({ run, peer }) {
    const key = JSON.stringify([run, peer]);
    const isNew = !this.peers.has(key);
    if (isNew) this.peers.set(key, new Peer(run, peer));
    return { key, peer: this.peers.get(key), isNew };
  }

  // The swarm of a run as one of its peers sees it: rows by peer, and when that was.
  table(run) {
    if (!this.tables.has(run)) this.tables.set(run, { rows: new Map(), now: 0 });
    return this.tables.get(run);
  }

  applyTable({ run, rows, gone, time_s: time }) {
    const table = this.table(run);
    for (const row of rows) table.rows.set(row.peer_id, row);
    for (const id of gone) table.rows.delete(id);
    table.now = time;
  }

  get several() {
    return new Set([...this.peers.values()].map((peer) => peer.run)).size > 1;
  }

  label(peer) {
    return this.several ? `${peer.run}/${peer.name}` : peer.name;
  }

  sorted() {
    return [...this.peers.values()].sort((a, b) => byName(a.run, b.run) || byName(a.name, b.name));
  }
}

export function byName(a, b) {
  return a.localeCompare(b, undefined, { numeric: true });
}

function said(event) {
  switch (event.event) {
    case "evaluation": return event.bits_per_byte === undefined
      ? `held-out loss ${decimal(event.loss)} at step ${event.step}`
      : `held-out bits per byte ${decimal(event.bits_per_byte)} at step ${event.step}`;
    case "checkpoint": return `checkpoint at step ${event.step}, ${bytes(event.bytes)}`;
    case "sample": return `“${event.prompt}” → ${event.text}`;
    case "warning": return `warning: ${event.message}`;
    case "expelled": return `expelled ${event.name}: ${event.reason}`;
    case "membership": {
      const [joined, left] = [texts(event.joined), texts(event.left)].map((names) => names.join(" "));
      return `${event.peers} peers${joined && `, joined: ${joined}`}${left && `, left: ${left}`}`;
    }
    case "run_finished": return `run ${event.reason} at step ${event.step}`;
    case "peer_lost": return `lost: ${event.reason}`;
    default: return null;
  }
}
