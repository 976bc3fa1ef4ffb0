"""The leader's part in a round: events in, messages out; no clock, no streams.

    FORMING --all answered, or deadline--> EXCHANGING --all hold, or deadline--> DONE
       '---------- fewer than two ready, or nothing to average ----------------> DONE

The group is the set of members that are ready on one and the same anchor, the best there is, or on
its siblings where the swarm is divided into several groups. Once
fixed it only shrinks: who is lost, or late with what it holds, is left out of the decision and
finds out from the membership records what happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from atomtrain.swarm.anchors.stamps import TOKENS_MAX, VERSION_MAX, Limit, Stamp, best_of, siblings
from atomtrain.swarm.membership.guards import bounded_weights, led_weights
from atomtrain.swarm.transport.messages import (
    TAKEN_BACK,
    Abandon,
    Begin,
    Commit,
    Decline,
    Held,
    Invite,
    Message,
    Ready,
)


class Phase(Enum):
    """Where the round is."""

    FORMING = "forming"
    EXCHANGING = "exchanging"
    DONE = "done"


@dataclass(frozen=True, kw_only=True)
class RoundCall:
    """What the leader calls its members to."""

    round_id: str
    round_index: int
    fragment: int
    version: int
    """Version of the best anchor that the leader knows of."""
    answer_s: float
    """How long members may take until they are ready."""
    exchange_s: Callable[[int, bool], float]
    """How long the exchange may take in a group of so many members, and with bases."""
    slices_each: Callable[[int], int]
    """How many slices each member of a group of so many owns."""
    decision_s: float
    """How much longer than the exchange the leader waits for what members hold."""
    groups: int = 1
    """Into how many groups the swarm is divided, this one included."""
    slack: int = 0
    """So many versions apart anchors may be in one group; 0: it has one anchor."""
    limit: Limit = Limit(VERSION_MAX, TOKENS_MAX)  # noqa: RUF009 - not to be changed
    """What no anchor of the run can be beyond."""
    refused: Collection[str] = ()
    """Digests of anchors that did harm at the leader."""
    certain: Callable[[str, Stamp], bool] = lambda *_: True
    """Whether what a member says of its anchor counts for the leader."""
    lowered: Callable[[Sequence[str], Sequence[int]], Sequence[int]] = lambda _, weights: weights
    """What members weigh, of what they claim, by what the leader has seen of them."""
    leader: str = ""
    """Who leads."""
    trusted: Callable[[str], bool] = lambda _: True
    """Whether a member counts: not if the leader has caught it lying in this very exchange."""


Outgoing = list[tuple[str, Message]]


class LeaderRound:
    """One round, seen by its leader, who is also one of the members.

    Guarantee: every member that gets `Commit` gets the same one, and holds the same bytes of every
    slice in it.
    """

    def __init__(self, call: RoundCall, members: Iterable[str], now_s: float) -> None:
        """Prepare to invite `members`."""
        self.call = call
        self.phase = Phase.FORMING
        self.result: Commit | Abandon | None = None
        self.deadline_s = now_s + call.answer_s
        self.group: tuple[str, ...] = ()
        self.newer_round = 0
        self.late: set[str] = set()
        """Members that said nothing by a deadline."""
        self._waiting = set(members)
        self._invited = frozenset(self._waiting)
        self.survivors: tuple[str, ...] = ()
        """Members on whose word the decision counts."""
        self._ready: dict[str, Ready] = {}
        self._held: dict[str, Held] = {}
        self._refusals: dict[str, str] = {}

    @property
    def unanswered(self) -> frozenset[str]:
        """Members whose answer to the invitation is still to come."""
        return frozenset(self._waiting) if self.phase is Phase.FORMING else frozenset()

    @property
    def absent(self) -> frozenset[str]:
        """Members that took no part: of a round without a decision those that said nothing."""
        if not self.survivors:
            return frozenset(self.late)
        return self._invited - frozenset(self.survivors)

    def start(self) -> Outgoing:
        """Return the invitations."""
        call = self.call
        invite = Invite(
            round_id=call.round_id,
            round_index=call.round_index,
            fragment=call.fragment,
            version=call.version,
            slack=call.slack,
            answer_s=call.answer_s,
        )
        return [(member, invite) for member in sorted(self._waiting)]

    def on_message(self, member: str, message: Message, now_s: float) -> Outgoing:
        """Take a member's message; those that do not fit the phase are ignored."""
        if self.phase is Phase.FORMING and member in self._waiting:
            if isinstance(message, Ready):
                if refusal := self.call.limit.refusal(_stamp(message).next(message.weight)):
                    self._refusals[member] = f"claims {refusal}"
                    return self.on_lost(member, now_s)
                if message.digest in self.call.refused:
                    self._refusals[member] = "its anchor did harm here"
                    return self.on_lost(member, now_s)
                self._ready[member] = message
            elif isinstance(message, Decline):
                self._refusals[member] = message.reason
                self.newer_round = max(self.newer_round, message.round_index)
            else:
                return self.on_lost(member, now_s)
            self._waiting.discard(member)
        elif self.phase is Phase.EXCHANGING and member in self._held and message == TAKEN_BACK:
            del self._held[member]  # another has shown it that an owner lied
            self._waiting.add(member)
            return [(member, message)]
        elif self.phase is Phase.EXCHANGING and member in self._waiting:
            slices = len(self.group) * self.call.slices_each(len(self.group))
            if not isinstance(message, Held) or len(message.digests) != slices:
                return self.on_lost(member, now_s)
            self._held[member] = message
            self._waiting.discard(member)
        return self._advance(now_s)

    def on_lost(self, member: str, now_s: float) -> Outgoing:
        """Hear that the stream to a member broke."""
        self._waiting.discard(member)
        self._ready.pop(member, None)
        self._held.pop(member, None)
        self._refusals.setdefault(member, "gone")
        return self._advance(now_s)

    def on_tick(self, now_s: float) -> Outgoing:
        """Look at the clock."""
        if self.phase is not Phase.DONE and now_s >= self.deadline_s:
            self.late |= self._waiting
            for member in self._waiting:
                self._refusals.setdefault(member, "too late")
            self._waiting.clear()
        return self._advance(now_s)

    def _advance(self, now_s: float) -> Outgoing:
        if self._waiting:
            return []
        if self.phase is Phase.FORMING:
            return self._fix_group(now_s)
        if self.phase is Phase.EXCHANGING:
            return self._decide()
        return []

    def _fix_group(self, now_s: float) -> Outgoing:
        if not self._ready:
            return self._finish(Abandon(reason="nobody was ready" + self._why()), [])
        best, near = self._near()
        group = sorted(near)
        everybody = sorted(self._ready)
        if len(group) < 2:
            alike = " on the same anchor" if len(self._ready) > 1 else ""
            reason = f"no two members were ready{alike}{self._why()}"
            return self._finish(Abandon(reason=reason), everybody)
        claimed = bounded_weights([self._ready[member].weight for member in group])
        leader = group.index(self.call.leader) if self.call.leader in group else None
        weights = led_weights(self.call.lowered(group, claimed), leader)
        if not any(weights):
            return self._finish(Abandon(reason="nobody has trained since"), everybody)
        self.group = tuple(group)
        self.phase = Phase.EXCHANGING
        self._waiting = set(group)
        bases = self.call.groups > 1 or len(set(near.values())) > 1
        exchange_s = self.call.exchange_s(len(group), bases)
        self.deadline_s = now_s + exchange_s + self.call.decision_s
        begin = Begin(
            round_id=self.call.round_id,
            members=self.group,
            weights=weights,
            late=tuple(self._ready[member].late for member in group),
            exchange_s=exchange_s,
            bases=bases,
            version=max(stamp.version for stamp in near.values()),
            tokens=max(stamp.tokens for stamp in near.values()),
            groups=self.call.groups,
        )
        behind = Abandon(reason=f"anchor is not version {best.version} of the others")
        return [(member, begin if member in self._waiting else behind) for member in everybody]

    def _near(self) -> tuple[Stamp, dict[str, Stamp]]:
        """Return the best anchor that a member is ready on, and who is ready on it or a sibling.

        Those count of which the leader knows that there are such anchors, or on which more than
        half are ready; if there are none, all. Nobody raises version or tokens beyond what counts.
        Of several with the same of both it is the one on which most are.
        """
        slack = self.call.slack
        stamps = {member: _stamp(ready) for member, ready in self._ready.items()}
        held = Counter(stamps.values())
        counting = [
            stamp
            for member, stamp in stamps.items()
            if self.call.certain(member, stamp) or 2 * held[stamp] > len(stamps)
        ] or [*stamps.values()]
        best = best_of(counting)
        assert best is not None, "somebody is ready"
        tied = [stamp for stamp in counting if stamp == best or stamp.ties(best)]
        most_held = max(held[stamp] for stamp in tied)
        best = best_of(stamp for stamp in tied if held[stamp] == most_held) or best
        beside = [stamp for stamp in counting if siblings(stamp, best, slack)]
        top, most = max(s.version for s in beside), max(s.tokens for s in beside)
        near = {
            member: stamp
            for member, stamp in stamps.items()
            if siblings(stamp, best, slack) and stamp.version <= top and stamp.tokens <= most
        }
        return best, {m: stamp for m, stamp in near.items() if top - stamp.version <= slack}

    def _decide(self) -> Outgoing:
        """Commit the slices that all survivors hold alike.

        If there is none, whoever holds least of what most hold is left out, as if it had died: it
        must not be able to keep the others from averaging. Two thirds of the group remain.
        """
        survivors = sorted(filter(self.call.trusted, self._held))
        while not (agreed := self._alike(survivors)):
            if 3 * (len(survivors) - 1) < 2 * len(self.group) or len(survivors) < 3:
                abandon = Abandon(reason="no slice reached everybody" + self._why())
                return self._finish(abandon, sorted(self._held))
            odd = self._odd_one(survivors)
            survivors.remove(odd)
            self._refusals.setdefault(odd, "lacks what others hold")
        self.survivors = tuple(survivors)
        return self._finish(Commit(slices=agreed, absent=tuple(sorted(self.absent))), survivors)

    def _alike(self, members: Sequence[str]) -> tuple[int, ...]:
        columns = zip(*(self._held[member].digests for member in members), strict=True)
        return tuple(j for j, column in enumerate(columns) if column[0] and len(set(column)) == 1)

    def _odd_one(self, members: Sequence[str]) -> str:
        """Return the member that holds least of what most of these hold."""
        columns = zip(*(self._held[member].digests for member in members), strict=True)
        usual = [Counter(column).most_common(1)[0][0] for column in columns]

        def shared(member: str) -> int:
            digests = self._held[member].digests
            return sum(bool(own) and own == most for own, most in zip(digests, usual, strict=True))

        return min(members, key=shared)

    def _finish(self, result: Commit | Abandon, to: list[str]) -> Outgoing:
        self.phase = Phase.DONE
        self.result = result
        return [(member, result) for member in to]

    def _why(self) -> str:
        details = ", ".join(f"{m[-8:]}: {why}" for m, why in sorted(self._refusals.items()))
        return f" ({details[:500]})" if details else ""


def _stamp(ready: Ready) -> Stamp:
    return Stamp(ready.version, ready.tokens, ready.digest)
