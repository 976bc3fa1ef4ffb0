// The swarm: one row a peer, kept in place and changed cell by cell. Rows out of sight have their
// name only, by which they can be searched for, so that thousands stay smooth.

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
const NAME_ONLY = COLUMNS.slice(0, 1);
const ROWS_A_FRAME = 120;
const ROWS_NEAR = 20;
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

// Which mark a row has on the map.
export function markOf(row) {
  if (row.is_self) return "self";
  if (row.reachable === false) return "gone";
  return wayOf(row) === "relayed" ? "relayed" : "direct";
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
    this.scroller = table.parentElement;
    this.rows = new Map();
    this.now = 0;
    this.shown = new Map();
    this.order = [];
    this.whole = new Set();
    this.sorted = { id: "name", down: false };
    this.head(table.tHead);
    this.scroller.addEventListener("scroll", () => this.drawSeen());
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

  draw({ rows, now } = this) {
    const all = { now, tokens: 0 };
    for (const row of rows.values()) all.tokens += row.tokens || 0;
    Object.assign(this, { rows, now, all, changed: true });
    if (!this.working) this.drawSome();
  }

  drawSome() {
    Object.assign(this, { working: true, changed: false });
    const missing = [...this.rows.keys()].filter((id) => !this.shown.has(id));
    for (const id of missing.slice(0, ROWS_A_FRAME)) this.drawRow(id, NAME_ONLY);
    if (missing.length > ROWS_A_FRAME) {
      requestAnimationFrame(() => this.drawSome());
      return;
    }
    this.drawSeen();
    for (const [id, shown] of this.shown) {
      if (this.rows.has(id)) continue;
      shown.remove();
      this.shown.delete(id);
    }
    this.order = this.inOrder();
    this.placeSome(0, this.body.firstElementChild);
  }

  // All rows are equally high.
  drawSeen() {
    const height = this.body.firstElementChild?.offsetHeight;
    if (!height) return;
    const { scrollTop, clientHeight } = this.scroller;
    const from = Math.max(0, Math.floor(scrollTop / height) - ROWS_NEAR);
    const to = Math.ceil((scrollTop + clientHeight) / height) + ROWS_NEAR;
    const seen = new Set(this.order.slice(from, to));
    for (const id of seen) this.drawRow(id, COLUMNS);
    for (const id of this.whole) if (!seen.has(id)) this.drawRow(id, NAME_ONLY);
    this.whole = seen;
  }

  inOrder() {
    const column = COLUMNS.find((one) => one.id === this.sorted.id);
    const sign = this.sorted.down ? -1 : 1;
    const keyed = [...this.shown.keys()].map((id) => [column.value(this.rows.get(id)), id]);
    keyed.sort(([left, idA], [right, idB]) => {
      const by = typeof left === "number" && typeof right === "number" ? left - right
        : COLLATOR.compare(String(left), String(right));
      return sign * by || (idA < idB ? -1 : 1);
    });
    return keyed.map(([, id]) => id);
  }

  drawRow(id, columns) {
    const row = this.rows.get(id);
    if (!row) return;
    let shown = this.shown.get(id);
    if (!shown) {
      shown = element("tr", { title: id });
      this.shown.set(id, shown);
    }
    const look = `${row.is_self ? "self" : ""} ${row.reachable === false ? "gone" : ""}`.trim();
    if (shown.className !== look) shown.className = look;
    while (shown.cells.length > columns.length) shown.lastElementChild.remove();
    columns.forEach((column, index) => {
      if (!shown.cells[index]) shown.append(element("td", { class: column.number ? "number" : "" }));
      setText(shown.cells[index], column.text(row, this.all) ?? "-");
    });
  }

  // Moves only rows that are not where they belong, some a frame.
  placeSome(index, present) {
    let moved = 0;
    for (; index < this.order.length && moved < ROWS_A_FRAME; index += 1) {
      const row = this.shown.get(this.order[index]);
      if (row === present) {
        present = present.nextElementSibling;
      } else {
        this.body.insertBefore(row, present);
        moved += 1;
      }
    }
    if (moved) this.drawSeen();
    if (index < this.order.length) {
      requestAnimationFrame(() => this.placeSome(index, present));
      return;
    }
    this.working = false;
    if (this.changed) this.drawSome();
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
