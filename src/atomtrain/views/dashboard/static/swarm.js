// The swarm: one row a peer, kept in place and changed cell by cell, so that thousands stay smooth.

import { bytes, clock, count, element, percent, rate, seconds, setHead, setRows, setText, texts } from "./format.js";

const COLUMNS = [
  { id: "name", name: "name", text: (row) => row.name, value: (row) => row.name },
  { id: "state", name: "state", text: stateOf, value: stateOf },
  { id: "steps", name: "steps", text: (row) => count(row.steps), value: (row) => row.steps, number: true },
  { id: "behind", name: "behind", text: behindOf, value: (row) => row.behind, number: true },
  { id: "speed", name: "tokens/s", text: (row) => count(row.tokens_per_s), value: (row) => row.tokens_per_s, number: true },
  { id: "share", name: "share of tokens", text: (row, all) => percent(all.tokens ? row.tokens / all.tokens : 0), value: (row) => row.tokens, number: true },
  { id: "link", name: "link free", text: (row) => rate(row.free_bytes_per_s), value: (row) => row.free_bytes_per_s ?? -1, number: true },
  { id: "way", name: "reached", text: wayOf, value: wayOf },
  { id: "seen", name: "last news", text: (row, all) => agoOf(row, all), value: (row) => row.seen_s ?? 0, number: true },
];
const MOST_IN_MATRIX = 24;
const MOST_ROUNDS = 60;
const ROWS_A_FRAME = 120;
const COLLATOR = new Intl.Collator(undefined, { numeric: true });

function stateOf(row) {
  return row.reachable === false ? "unreachable" : row.state;
}

function behindOf(row) {
  return row.behind === 0 ? "current" : `${row.behind} fragment${row.behind === 1 ? "" : "s"}`;
}

function wayOf(row) {
  if (row.is_self) return "this peer";
  const addresses = texts(row.addresses);
  if (!addresses.length) return "-";
  return addresses.some((address) => address.includes("/p2p-circuit")) ? "relayed" : "direct";
}

function agoOf(row, all) {
  if (row.ended_s) return `ended ${clock(row.ended_s)}`;
  if (!row.seen_s || row.state === "unknown") return "-";
  const ago = Math.max(0, all.now - row.seen_s);
  if (ago < 1) return "now";
  return `${ago < 60 ? `${Math.round(ago)} s` : seconds(ago)} ago`;
}

export class PeerTable {
  constructor(table) {
    this.body = table.tBodies[0];
    this.rows = new Map();
    this.now = 0;
    this.shown = new Map();
    this.sorted = { id: "name", down: false };
    this.head(table.tHead);
  }

  head(head) {
    const cells = COLUMNS.map((column) => {
      const button = element("button", { type: "button" }, column.name);
      button.addEventListener("click", () => this.sort(column.id));
      return element("th", { scope: "col", class: column.number ? "number" : "" }, button);
    });
    head.append(element("tr", {}, ...cells));
    this.headers = cells;
    this.markSorted();
  }

  sort(id) {
    this.sorted = { id, down: this.sorted.id === id && !this.sorted.down };
    this.markSorted();
    this.draw();
  }

  markSorted() {
    COLUMNS.forEach((column, index) => {
      if (column.id !== this.sorted.id) this.headers[index].removeAttribute("aria-sort");
      else this.headers[index].setAttribute("aria-sort", this.sorted.down ? "descending" : "ascending");
    });
  }

  // Draws some rows a frame, so that a table of thousands never makes the page stutter.
  draw({ rows, now } = this) {
    Object.assign(this, { rows, now });
    const all = { now, tokens: 0 };
    for (const row of this.rows.values()) all.tokens += row.tokens || 0;
    this.waiting = [...this.rows.keys()];
    this.all = all;
    if (!this.working) this.drawSome();
  }

  drawSome() {
    this.working = true;
    for (const id of this.waiting.splice(0, ROWS_A_FRAME)) {
      const row = this.rows.get(id);
      if (row) this.drawRow(id, row, this.all);
    }
    if (this.waiting.length) {
      requestAnimationFrame(() => this.drawSome());
      return;
    }
    for (const [id, shown] of this.shown) {
      if (this.rows.has(id)) continue;
      shown.remove();
      this.shown.delete(id);
    }
    this.waitingRows = this.order();
    this.placeSome(this.body.firstElementChild);
  }

  order() {
    const column = COLUMNS.find((one) => one.id === this.sorted.id);
    const sign = this.sorted.down ? -1 : 1;
    const keyed = [...this.shown.entries()].map(([id, shown]) => [column.value(this.rows.get(id)), id, shown]);
    keyed.sort(([left, idA], [right, idB]) => {
      const by = typeof left === "number" && typeof right === "number" ? left - right
        : COLLATOR.compare(String(left), String(right));
      return sign * by || (idA < idB ? -1 : 1);
    });
    return keyed.map(([, , shown]) => shown);
  }

  drawRow(id, row, all) {
    let shown = this.shown.get(id);
    if (!shown) {
      shown = element("tr", {}, ...COLUMNS.map((column) => element("td", { class: column.number ? "number" : "" })));
      shown.title = id;
      this.shown.set(id, shown);
    }
    const look = `${row.is_self ? "self" : ""} ${row.reachable === false ? "gone" : ""}`.trim();
    if (shown.className !== look) shown.className = look;
    COLUMNS.forEach((column, index) => setText(shown.cells[index], column.text(row, all) ?? "-"));
  }

  // Moves only rows that are not where they belong, some a frame.
  placeSome(present) {
    for (const row of this.waitingRows.splice(0, ROWS_A_FRAME)) {
      if (row === present) present = present.nextElementSibling;
      else this.body.insertBefore(row, present);
    }
    if (this.waitingRows.length) {
      requestAnimationFrame(() => this.placeSome(present));
      return;
    }
    this.working = false;
    if (this.waiting.length) this.drawSome();
  }

  summary() {
    const rows = [...this.rows.values()];
    const ended = rows.filter((row) => row.ended_s);
    if (ended.length && ended.length + rows.filter((row) => row.state === "unknown").length === rows.length) {
      const last = ended.reduce((a, b) => (b.ended_s > a.ended_s ? b : a));
      return `The run has ended: ${last.name} was the last, ${last.state} at ${clock(last.ended_s)}.`;
    }
    const training = rows.filter((row) => stateOf(row) === "training");
    const speed = training.reduce((sum, row) => sum + (row.tokens_per_s || 0), 0);
    return `${rows.length} peers, ${training.length} training, ${count(speed)} tokens/s together`;
  }
}

export class RoundList {
  constructor(table, pairs) {
    this.body = table.tBodies[0];
    this.pairs = pairs;
    setHead(table.tHead, ["round", "fragment", "outcome", "members", "sent", "received", "took", "why"]);
  }

  // rounds: round events, oldest first.
  draw(rounds) {
    setRows(this.body, rounds.slice(-MOST_ROUNDS).reverse().map((round) => [
      round.round, round.fragment, round.outcome, texts(round.members).join(", ") || round.contributors,
      bytes(round.bytes_sent), bytes(round.bytes_received), seconds(round.duration_s), round.reason || "-",
    ]));
    this.drawPairs(rounds);
  }

  drawPairs(rounds) {
    const names = [...new Set(rounds.flatMap((round) => texts(round.members)))].sort();
    if (names.length < 2 || names.length > MOST_IN_MATRIX) {
      this.pairs.replaceChildren();
      return;
    }
    const times = new Map();
    for (const round of rounds) {
      const members = new Set(texts(round.members));
      for (const a of members) for (const b of members) times.set(`${a}\n${b}`, (times.get(`${a}\n${b}`) ?? 0) + 1);
    }
    const head = element("tr", {}, element("th", {}, "rounds together"),
      ...names.map((name) => element("th", { scope: "col" }, name)));
    const rows = names.map((a) => element("tr", {}, element("th", { scope: "row" }, a),
      ...names.map((b) => element("td", {}, a === b ? "" : String(times.get(`${a}\n${b}`) ?? 0)))));
    this.pairs.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  }
}

// Who was expelled for good, and whose contribution did not count; newest first.
export class Judgements {
  constructor(table, note) {
    Object.assign(this, { body: table.tBodies[0], note, table });
    setHead(table.tHead, ["when", "peer", "what", "why", "judged by"]);
  }

  // rows: the swarm's table, by id: rejections name the end of an id.
  draw(peers, rows) {
    const nameOf = (id) => [...rows.values()].find((row) => String(row.peer_id).endsWith(id))?.name ?? id;
    const found = peers.flatMap((peer) => [
      ...peer.expelled.map((event) => [event.time_s, event.name, "expelled", event.reason, peer.name]),
      ...peer.rounds.flatMap((round) => texts(round.rejected).map((text) => {
        const [id, why] = text.split(/: (.*)/s);
        return [round.time_s, nameOf(id), `rejected in round ${round.round}`, why, peer.name];
      })),
    ]).sort((a, b) => b[0] - a[0]).slice(0, MOST_ROUNDS);
    this.table.parentElement.hidden = !found.length;
    setText(this.note, found.length
      ? "Each peer judges by what it has seen itself."
      : "Nobody was expelled, and no contribution rejected, as far as is known here.");
    setRows(this.body, found.map(([time, ...texts]) => [clock(time), ...texts]));
  }
}
