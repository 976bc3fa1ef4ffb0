"""Guards: what an owner does with contributions that cannot be honest, and whom it trusts.

Everything here is one peer's own judgement of what it received; nobody is asked, nobody told. Only
weights are what the leader says, and each member checks that.

* *Reject*: a contribution that is not finite, or cannot be decoded, or whose norm is above
  `limit` times the median of the group's, times `weight / median weight` bounded to 1 to 10,
  since a change grows at most in proportion to the tokens it was learnt from.
* *Weight*: nobody weighs more than ten times the median of the group, whatever tokens it claims.
* *Clip*: the mean by centred clipping (Karimireddy, He, Jaggi 2021, "Learning from History for
  Byzantine Robust Optimization", equation 2): `v += sum of w_i (x_i - v) min(1, tau / |x_i - v|)`,
  from `v = 0`, with the median of the distances as `tau`.
* *Standing*: a peer rejected several times in a row is not counted for a while. A peer that comes
  to this judgement about itself starts again from the anchor.

Norms of fewer than three contributions, or of very few elements, prove nothing and are not judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

JUDGED_ELEMENTS = 32
"""Norms of fewer elements differ too much by chance."""
_JUDGED_MEMBERS = 3
_CLIP_ITERATIONS = 5
_TOKENS_ALLOWANCE_MAX = 10.0
_WEIGHT_MAX = 10
"""Times the median weight that a member may weigh at most."""
_STRIKES = 2
_EXCLUDED_ROUNDS = 8
_EXCLUDED_ROUNDS_MAX = 1024


@dataclass(frozen=True)
class Guard:
    """How an owner judges the contributions to its slice."""

    limit: float = 0.0
    """Norms above this multiple of the median are rejected; 0: none is."""
    mean: str = "plain"
    """`plain` or `clipped`."""

    def too_large(
        self, norms: Mapping[int, float], elements: int, weights: Sequence[int]
    ) -> dict[int, str]:
        """Return the members whose contribution is to be rejected, and why.

        `norms` are those of the contributions, of so many elements each.
        """
        if not self.limit or not _can_judge(len(norms), elements):
            return {}
        median = statistics.median_low(norms.values())
        usual = statistics.median_low(weights[member] for member in norms)
        found = {}
        for member, norm in norms.items():
            share = weights[member] / usual
            allowed = self.limit * min(max(1.0, share), _TOKENS_ALLOWANCE_MAX)
            if median > 0 and norm > allowed * median:
                found[member] = f"{norm / median:.3g} times the median norm"
        return found

    def mean_too_large(
        self,
        mean_rms: float,
        own_rms: float,
        usual_rms: float,
        own_weight: int,
        weights: Sequence[int],
    ) -> bool:
        """Say whether a mean cannot be right, by what this peer knows itself.

        The measure is `usual_rms`, the root mean square of the fragment's last mean, or that of
        this peer's own contribution if it is larger, in proportion to the tokens of the others.
        Without a last mean the anchor's size stands in for it, and with a zero anchor nothing is
        judged: a peer that learns little must not veto the rest.
        """
        if not self.limit or not usual_rms:
            return False
        own_share = own_rms * max(weights) / own_weight if own_weight else 0.0
        return mean_rms > self.limit * max(usual_rms, own_share)

    def mean_of(
        self,
        contributions: Mapping[int, torch.Tensor],
        weights: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted mean of at least one contribution; float32, summed in order.

        It is in `out`; without one, in the contributions' memory or in new memory.
        """
        members = sorted(contributions)
        total = sum(weights[member] for member in members)
        elements = contributions[members[0]].numel()
        if self.mean == "clipped" and _can_judge(len(members), elements):
            mean = _centred_clipping(
                [contributions[m] for m in members], [weights[m] / total for m in members]
            )
            return mean if out is None else out.copy_(mean)
        first = contributions[members[0]]
        mean = torch.mul(first, weights[members[0]] / total, out=first if out is None else out)
        for member in members[1:]:
            mean.add_(contributions[member], alpha=weights[member] / total)
        return mean


def bounded_weights(weights: Sequence[int]) -> tuple[int, ...]:
    """Return the weights that count of those that a group's members claim, in tokens.

    Where at least three have any, nobody has more than ten times the median (of an even number the
    lower one) of those. Bounding what is bounded changes nothing.
    """
    claimed = [weight for weight in weights if weight > 0]
    if len(claimed) < _JUDGED_MEMBERS:
        return tuple(weights)
    most = _WEIGHT_MAX * statistics.median_low(claimed)
    return tuple(min(weight, most) for weight in weights)


def _can_judge(members: int, elements: int) -> bool:
    return members >= _JUDGED_MEMBERS and elements >= JUDGED_ELEMENTS


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _centred_clipping(values: list[torch.Tensor], shares: list[float]) -> torch.Tensor:
    centre = torch.zeros_like(values[0])
    for _ in range(_CLIP_ITERATIONS):
        distances = [_norm(x - centre) for x in values]
        radius = statistics.median_low(distances)
        step = torch.zeros_like(centre)
        for x, share, distance in zip(values, shares, distances, strict=True):
            factor = share * min(1.0, radius / distance) if distance else 0.0
            step.add_(x, alpha=factor).sub_(centre, alpha=factor)
        centre.add_(step)
    return centre


@dataclass
class _Record:
    strikes: int = 0
    exclusions: int = 0
    until_round: int = 0


class Standing:
    """What one peer thinks of the others, by the evidence it has seen itself.

    Two rejections in a row exclude a peer for 8 rounds, then 16 the next time, up to 1024.
    A contribution that counts clears its strikes.
    """

    def __init__(self) -> None:
        """Everybody is in good standing."""
        self._records: dict[str, _Record] = {}
        self._usual_rms: dict[int, float] = {}

    def usual_rms(self, fragment: int) -> float:
        """Return the root mean square of the fragment's last mean; 0 before there was one."""
        return self._usual_rms.get(fragment, 0.0)

    def observe_means(self, fragment: int, elements: int, square: float) -> None:
        """Hear how many elements of a fragment were committed, and the sum of their squares."""
        if elements:
            self._usual_rms[fragment] = math.sqrt(square / elements)

    def observe(self, peer_id: str, round_index: int, *, rejected: bool) -> None:
        """Hear how a peer's contribution to round `round_index` was judged."""
        record = self._records.setdefault(peer_id, _Record())
        if not rejected:
            record.strikes = 0
            return
        record.strikes += 1
        if record.strikes >= _STRIKES:
            rounds = min(_EXCLUDED_ROUNDS << record.exclusions, _EXCLUDED_ROUNDS_MAX)
            record.until_round = round_index + 1 + rounds
            record.exclusions = min(record.exclusions + 1, 16)
            record.strikes = 0

    def excluded(self, round_index: int) -> frozenset[str]:
        """Return the peers whose contributions do not count in round `round_index`."""
        return frozenset(p for p, r in self._records.items() if round_index < r.until_round)
