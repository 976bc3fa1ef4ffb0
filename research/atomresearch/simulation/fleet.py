"""A swarm of unlike peers that come and go, round by round, up to tens of thousands of them.

`swarm` simulates a few peers that all stay. Here every peer has its own speed, its own link with
its own rate up and down, and its own times at home and away; members of a round may be shuffled
into groups of bounded size that average among themselves; and what is counted is what large swarms
are asked for: tokens, averages, contributions lost, bytes, time until a newcomer takes part, and
how far replicas drift apart.

The state of a peer is a few numbers, and every number of all peers is one array, so a round costs a
few passes over the arrays, however long it lasts.

Drift is followed by one number a peer and fragment: a random walk that takes a step of variance 1
for each local step, and that a round replaces by the mean of the peer's group. What stands for a
parameter is thus as uncorrelated between peers as gradients' noise is; the common part of all
peers' progress needs no averaging to agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from atomtrain.errors import ConfigError

Floats = npt.NDArray[np.float64]
_PATIENCE = 4.0
"""A member is left out of an exchange that takes it so many times what the slowest of the recent
rounds took for each byte (`swarm.timing`)."""
_REMEMBERED_ROUNDS = 8
_SETTLING_SHARE = 0.25
"""Share of the rounds, at the beginning, of which drift is not counted."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """What peers are like; arrays of one number a peer."""

    step_s: Floats
    """A local step."""
    up_bits_per_s: Floats
    down_bits_per_s: Floats
    one_way_s: Floats
    """From this peer to the middle of the network; a message takes the sum of two peers'."""
    stay_s: float = math.inf
    """Mean time that a peer takes part before it is gone without a word; exponential."""
    away_s: float = 600.0
    """Mean time until it is back; exponential."""

    def __post_init__(self) -> None:
        """Raises ConfigError for what cannot be peers."""
        arrays = (self.step_s, self.up_bits_per_s, self.down_bits_per_s, self.one_way_s)
        if len({len(values) for values in arrays}) != 1 or len(self.step_s) < 2:
            lengths = [len(values) for values in arrays]
            raise ConfigError(f"a swarm needs at least two peers, alike many everywhere: {lengths}")
        if min(values.min() for values in arrays[:3]) <= 0 or self.one_way_s.min() < 0:
            raise ConfigError("step times and rates must be above 0, delays at least 0")
        if self.stay_s <= 0 or self.away_s <= 0:
            raise ConfigError(
                f"peers stay {self.stay_s:g} s and are away {self.away_s:g} s on average; both "
                "must be above 0"
            )

    @property
    def count(self) -> int:
        """Number of peers, those away included."""
        return len(self.step_s)


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """What peers average, and how."""

    tokens_per_step: int
    contribution_bytes: int
    """A whole fragment's changes as they travel."""
    mean_bytes: int
    """A whole fragment's mean as it travels."""
    fragments: int
    local_steps: int
    """Local steps (H) of the fastest peer in which every fragment is averaged once."""
    group_peers: int | None = None
    """Members of a round are shuffled into groups of at most so many (one more where else somebody
    would be alone); `None`: one group of all."""
    base_bytes: int = 0
    """A whole fragment's base as it travels, where there are several groups: see docs/groups.md."""
    state_bytes: int = 0
    """What a newcomer, or a peer that comes back, fetches before it takes part."""
    codec_s: float = 0.0
    """See `SwarmWork`."""

    def __post_init__(self) -> None:
        """Raises ConfigError for what cannot be averaged."""
        numbers = (
            self.tokens_per_step,
            self.contribution_bytes,
            self.mean_bytes,
            self.fragments,
            self.local_steps,
        )
        if min(numbers) < 1 or min(self.state_bytes, self.base_bytes) < 0:
            raise ConfigError(f"{self}: numbers of tokens, bytes, fragments and steps must be >= 1")
        if self.group_peers is not None and self.group_peers < 2:
            raise ConfigError(f"groups must be of at least 2 peers, not {self.group_peers}")


class FleetRun(NamedTuple):
    """What came of the rounds."""

    elapsed_s: float
    tokens_per_s: float
    """Of all peers together, those away counting nothing."""
    share_of_alone: float
    """Those tokens to what as many peers that always stay would train; waiting to join costs."""
    members: float
    """Mean number of peers in a round."""
    round_s: float
    """Mean time from proposal to decision."""
    averaged_every_s: float
    """Mean time between two averages of one fragment."""
    lost_share: float
    """Contributions that did not count, as their senders died or were too slow."""
    sent_bytes_per_token: float
    busiest_up_share: float
    """Share of the time in which the busiest member's uplink sends for rounds."""
    join_s: float
    """Mean time to fetch the state; 0: nobody came."""
    drift: float
    """Deviation of replicas from their mean right after a round of the fragment, to that of peers
    that never averaged it for as many steps as lie between two of its rounds."""


def simulate_fleet(peers: Peers, averaging: Averaging, rounds: int, seed: int = 0) -> FleetRun:
    """Run so many rounds, one after the other as `swarm.agenda` has them."""
    if rounds < 1:
        raise ConfigError(f"at least 1 round must be simulated, not {rounds}")
    return _Simulation(peers, averaging, seed).run(rounds)


class _Simulation:
    def __init__(self, peers: Peers, averaging: Averaging, seed: int) -> None:
        self.peers, self.averaging = peers, averaging
        self.random = np.random.default_rng(seed)
        count = peers.count
        self.now_s = 0.0
        self.phase_s = self.random.uniform(0, peers.step_s)
        self.here = np.ones(count, dtype=bool)
        self.member_from_s = np.zeros(count)
        self.toggle_s = self._after(np.zeros(count), peers.stay_s)
        self.here_s = np.zeros(count)
        self.counted_s = np.zeros(count)
        """Until when each peer's time here is in `here_s`."""
        self.walk = np.zeros((averaging.fragments, count))
        self.walked_s = np.zeros(averaging.fragments)
        self.recent_s_per_byte: list[float] = []
        self.joins: list[float] = []

    def run(self, rounds: int) -> FleetRun:
        averaging, peers = self.averaging, self.peers
        every_steps = max(1.0, averaging.local_steps / averaging.fragments)
        begun_s, lasted_s, contributions, lost = 0.0, 0.0, 0, 0
        sent_bytes, members_seen, drifts = 0.0, 0, []
        busy_s = np.zeros(peers.count)
        for index in range(rounds):
            fastest_s = self._fastest_s()
            due_s = max(self.now_s, begun_s + every_steps * fastest_s)
            self._advance(due_s)
            members = np.flatnonzero(self.here & (self.member_from_s <= due_s))
            if len(members) < 2:
                # Nobody to average with: the next round is tried when the next peer is back.
                begun_s = due_s
                continue
            found = self._round(index % averaging.fragments, members, due_s)
            begun_s = due_s
            self._advance(found.ended_s)
            lasted_s += found.ended_s - due_s
            contributions += len(members)
            members_seen += len(members)
            lost += found.lost
            sent_bytes += found.sent_bytes
            busy_s[members] += found.up_s
            if index >= _SETTLING_SHARE * rounds and not math.isnan(found.drift):
                drifts.append(found.drift)
        alone = float((averaging.tokens_per_step / peers.step_s).sum())
        tokens = float((self.here_s / peers.step_s).sum()) * averaging.tokens_per_step
        return FleetRun(
            elapsed_s=self.now_s,
            tokens_per_s=tokens / self.now_s,
            share_of_alone=tokens / self.now_s / alone,
            members=members_seen / rounds,
            round_s=lasted_s / rounds,
            averaged_every_s=self.now_s / rounds * averaging.fragments,
            lost_share=lost / max(1, contributions),
            sent_bytes_per_token=sent_bytes / max(1.0, tokens),
            busiest_up_share=float(busy_s.max()) / self.now_s,
            join_s=float(np.mean(self.joins)) if self.joins else 0.0,
            drift=float(np.mean(drifts)) if drifts else 0.0,
        )

    def _round(self, fragment: int, members: npt.NDArray[np.int64], due_s: float) -> _Round:
        """One round of `members`, each group by itself; the slowest group ends it."""
        peers, averaging = self.peers, self.averaging
        order = self.random.permutation(members)
        starts = _group_starts(len(order), averaging.group_peers)
        sizes = np.diff([*starts, len(order)])
        size_of = np.repeat(sizes, sizes).astype(np.float64)
        ways_s = np.repeat(np.maximum.reduceat(peers.one_way_s[order], starts), sizes)
        way_s = peers.one_way_s[order] + ways_s
        invited_s = due_s + 2 * way_s
        step_s, phase_s = peers.step_s[order], self.phase_s[order]
        snapshot_s = (np.floor((invited_s - phase_s) / step_s) + 1) * step_s + phase_s
        begun_s = np.repeat(np.maximum.reduceat(snapshot_s, starts), sizes) + 2 * way_s
        fragment_bytes = averaging.contribution_bytes + averaging.mean_bytes
        fragment_bytes += averaging.base_bytes if len(starts) > 1 else 0
        wire_bytes = (size_of - 1) / size_of * fragment_bytes
        up_s = 8 * wire_bytes / peers.up_bits_per_s[order]
        moving_s = np.maximum(up_s, 8 * wire_bytes / peers.down_bits_per_s[order])
        exchange_s = moving_s + 2 * way_s + averaging.codec_s
        in_time = exchange_s <= self._patience_s(wire_bytes, exchange_s)
        held_s = begun_s + exchange_s
        alive = self.toggle_s[order] > held_s
        counts = in_time & alive
        ended_in = np.maximum.reduceat(np.where(counts, held_s, 0.0), starts)
        ended_s = float(max(ended_in.max(), begun_s.max()) + 2 * way_s.max())
        if counts.any():
            self._remember(float((exchange_s / wire_bytes)[counts].max()))
        drift = self._average(fragment, order, starts, sizes, counts, due_s)
        # Up times in the members' own order.
        by_member = np.empty(peers.count)
        by_member[order] = np.where(counts, up_s, 0.0)
        sent_bytes = float(wire_bytes[counts].sum())
        lost = int((~counts).sum())
        return _Round(ended_s, lost, sent_bytes, by_member[members], drift)

    def _average(
        self,
        fragment: int,
        order: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        counts: npt.NDArray[np.bool_],
        due_s: float,
    ) -> float:
        """Let the fragment walk until now and average it; return the drift (nan: not known)."""
        walk = self.walk[fragment]
        steps = (due_s - self.walked_s[fragment]) / self.peers.step_s
        walk += self.random.standard_normal(len(walk)) * np.sqrt(steps)
        self.walked_s[fragment] = due_s
        # Weights are the tokens since the last contribution: the steps of that time.
        weight = np.where(counts, steps[order], 0.0)
        total = np.add.reduceat(weight, starts)
        mean = np.add.reduceat(weight * walk[order], starts) / np.where(total > 0, total, 1.0)
        # Who is in a group takes its mean, also if its own contribution came too late.
        walk[order] = np.where(np.repeat(total > 0, sizes), np.repeat(mean, sizes), walk[order])
        apart = float(walk[order].std())
        walked = math.sqrt(float(steps[order].mean()))
        return apart / walked if walked > 0 else math.nan

    def _advance(self, until_s: float) -> None:
        """Let peers train, leave and come back until then."""
        while True:
            due = np.flatnonzero(self.toggle_s <= until_s)
            if not len(due):
                break
            # Each of them toggles once; one that toggles again is due again.
            at_s = self.toggle_s[due]
            leaving = self.here[due]
            began_s = np.maximum(self.member_from_s[due], self.counted_s[due])
            self.here_s[due] += np.where(leaving, np.maximum(at_s - began_s, 0.0), 0.0)
            self.counted_s[due] = at_s
            coming = due[~leaving]
            fetch_s = 8 * self.averaging.state_bytes / self.peers.down_bits_per_s[coming]
            self.joins += fetch_s.tolist()
            self.member_from_s[coming] = at_s[~leaving] + fetch_s
            # Who is back starts from what the swarm agreed on.
            if len(coming):
                self.walk[:, coming] = self.walk.mean(axis=1, keepdims=True)
            self.here[due] = ~leaving
            stays = self._after(at_s, self.peers.stay_s)
            returns = self._after(at_s, self.peers.away_s)
            self.toggle_s[due] = np.where(leaving, returns, stays)
        began_s = np.maximum(self.member_from_s, self.counted_s)
        self.here_s += np.where(self.here, np.maximum(until_s - began_s, 0.0), 0.0)
        self.counted_s = np.full(self.peers.count, until_s)
        self.now_s = until_s

    def _fastest_s(self) -> float:
        here = self.here if self.here.any() else np.ones_like(self.here)
        return float(self.peers.step_s[here].min())

    def _after(self, at_s: Floats, mean_s: float) -> Floats:
        if math.isinf(mean_s):
            return np.full(len(at_s), math.inf)
        return at_s + self.random.exponential(mean_s, len(at_s))

    def _patience_s(self, wire_bytes: Floats, exchange_s: Floats) -> Floats:
        if not self.recent_s_per_byte:
            return np.full(len(wire_bytes), float(exchange_s.max()))
        return _PATIENCE * max(self.recent_s_per_byte) * wire_bytes

    def _remember(self, s_per_byte: float) -> None:
        self.recent_s_per_byte = [*self.recent_s_per_byte, s_per_byte][-_REMEMBERED_ROUNDS:]


class _Round(NamedTuple):
    ended_s: float
    lost: int
    sent_bytes: float
    up_s: Floats
    drift: float


def _group_starts(members: int, group_peers: int | None) -> npt.NDArray[np.int64]:
    """Return where groups begin: as few as the bound allows, as even as possible."""
    groups = 1 if group_peers is None else -(-members // group_peers)
    # A member alone would have nobody: with two members and more, no group is that small.
    groups = max(1, min(groups, members // 2))
    return (np.arange(groups) * members) // groups


def unlike(
    values: Sequence[float] | float, count: int, spread: float, random: np.random.Generator
) -> Floats:
    """Return `count` numbers around `values`, log-normal; `spread`: deviation of the logarithm."""
    centre = np.resize(np.asarray(values, dtype=np.float64), count)
    if spread == 0:
        return centre
    factors: Floats = np.exp(random.normal(0.0, spread, count))
    return centre * factors
