"""Guards: what an owner does with contributions that cannot be honest.

Everything here is one peer's own judgement of what it received; nobody is asked, nobody told. Only
weights are what the leader says, and each member checks that.

* *Reject*: a contribution that is not finite, or cannot be decoded, or whose norm is above
  `limit` times the median of the group's, times `weight / median weight` bounded to 1 to 10,
  since a change grows at most in proportion to the tokens it was learnt from.
* *Weight*: nobody weighs more than ten times the median of the group, whatever tokens it claims,
  and who leads not more than the median of the others.
* *Clip*: the mean by centred clipping (Karimireddy, He, Jaggi 2021, "Learning from History for
  Byzantine Robust Optimization", equation 2): `v += sum of w_i (x_i - v) min(1, tau / |x_i - v|)`,
  from `v = 0`, with the median of the distances as `tau`, and no weight above 1.25 medians.
  Where nobody is further from it than twice that, the plain mean is taken instead: so honest
  peers lose nothing.

Of an even number of norms or distances the upper median counts: two of four that send next to
nothing must not make the others look too large.

Norms of fewer than three contributions, or of very few elements, prove nothing and are not judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from atomtrain.swarm.membership.standing import FULL_ROUNDS

JUDGED_ELEMENTS = 32
"""Norms of fewer elements differ too much by chance."""
_JUDGED_MEMBERS = 3
"""Of fewer nobody knows who is the odd one."""
NORM_ROUNDING = 1e-3
"""Part of a norm by which machines may differ that add up the same squares in another order."""
_CLIP_ITERATIONS = 5
_RADIUS = 2.0
"""Times the median distance from the clipped mean that all contributions may be away, for the plain
mean to be taken."""
_SHARE_MAX = 1.25
"""Times the median weight that a clipped mean counts at most: tokens are only claimed. With more,
two of eight that claim too many would have a third of all weight, or more."""
_SHARES_OFF = 1e-6
"""By which shares may miss their bounds: they are rounded."""
_ROUNDING = 1e-3
"""Distances below this part of the median norm are rounding: sums of squares are float32."""
_TOKENS_ALLOWANCE_MAX = 10.0
_WEIGHT_MAX = 10
"""Times the median weight that a member may weigh at most."""


class Average(NamedTuple):
    """A mean, and what each contribution counts in it."""

    values: torch.Tensor
    shares: tuple[float, ...]
    """By contributor, ascending; empty: as its weight says."""


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
        median = statistics.median_high(norms.values())
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
        judged: a peer that learns little must not veto the rest. Nor must one that has learnt
        nothing since: where all are about where they want to be, their changes differ and the last
        mean was next to nothing.
        """
        if not self.limit or not usual_rms or not own_weight:
            return False
        own_share = own_rms * max(weights) / own_weight
        return mean_rms > self.limit * max(usual_rms, own_share)

    def mean_of(
        self,
        contributions: Mapping[int, torch.Tensor],
        weights: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> Average:
        """Return the weighted mean of at least one contribution; float32, summed in order.

        It is in `out`; without one, in the contributions' memory or in new memory.
        """
        members = sorted(contributions)
        values = [contributions[member] for member in members]
        counting = [weights[member] for member in members]
        shares: tuple[float, ...] = ()
        if self.mean == "clipped" and _can_judge(len(members), values[0].numel()):
            shares = _clipped_shares(values, counting)
        return Average(combined(values, shares or plain_shares(counting), out), shares)

    def admits(self, shares: Sequence[float], weights: Sequence[int]) -> bool:
        """Say whether an owner's shares of its contributors, of these weights, can be right.

        With c the sum of what counts whole, at least the smallest weights of more than half of
        the members, an iteration makes `(1 - c) b + w` of a share `b` at most, and `1 - c` times
        what they lack to 1 at least remains.
        """
        if not shares:
            return True
        if self.mean != "clipped" or len(shares) != len(weights):
            return False
        usual = plain_shares(_bounded_shares(weights))
        whole = math.fsum(sorted(usual)[: len(usual) // 2 + 1])
        reached = 1.0 - (1.0 - whole) ** _CLIP_ITERATIONS
        return reached - _SHARES_OFF <= math.fsum(shares) <= 1.0 + _SHARES_OFF and all(
            share <= most * reached / whole + _SHARES_OFF
            for share, most in zip(shares, usual, strict=True)
        )


def plain_shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Return each weight's part of their sum."""
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def combined(
    values: Sequence[torch.Tensor], shares: Sequence[float], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of `values`, each times its share, in order.

    It is in `out`, or in the memory of the first.
    """
    first = values[0]
    mean = torch.mul(first, shares[0], out=first if out is None else out)
    for each, share in zip(values[1:], shares[1:], strict=True):
        mean.add_(each, alpha=share)
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


def led_weights(weights: Sequence[int], leader: int | None) -> tuple[int, ...]:
    """Return the weights that count where the member at place `leader` leads; None: no member does.

    Where at least two others have any, it weighs at most their median (of an even number the lower
    one), since nobody else judges it in its own round; then `bounded_weights`. Doing so twice
    changes nothing.
    """
    others = [weight for place, weight in enumerate(weights) if place != leader and weight > 0]
    if leader is None or len(others) < _JUDGED_MEMBERS - 1:
        return bounded_weights(weights)
    most = statistics.median_low(others)
    return bounded_weights([min(w, most) if i == leader else w for i, w in enumerate(weights)])


def weights_flaw(
    weights: Sequence[int], place: int, claimed: int, leader: int | None, counted: int = 0
) -> str:
    """Return what is wrong with a leader's weights for the member at `place`; empty: nothing.

    `claimed` is what that member has said. A leader may lower it to what `led_weights` allows, and
    as `Standing.lowered` does with who is new: but it knows the member for `counted` rounds.
    """
    own = weights[place]
    if own > claimed or (own == 0) != (claimed == 0):
        return "changed this member's weight"
    if tuple(weights) != led_weights(weights, leader):
        return "lets one weigh too much"
    counting = [weight for weight in weights if weight > 0]
    most = claimed
    if len(counting) >= _JUDGED_MEMBERS:
        most = min(claimed, _WEIGHT_MAX * statistics.median_low(counting))
    if place != leader and own < most * (1 + counted) // (1 + FULL_ROUNDS):
        known = f", which it has counted in {counted} rounds at least" if counted else ""
        return f"lowered this member's weight further than a newcomer's{known}"
    return ""


def _can_judge(members: int, elements: int) -> bool:
    return members >= _JUDGED_MEMBERS and elements >= JUDGED_ELEMENTS


def _bounded_shares(weights: Sequence[int]) -> list[float]:
    most = _SHARE_MAX * statistics.median_high(weights)
    return [min(weight, most) for weight in weights]


def _clipped_shares(values: Sequence[torch.Tensor], weights: Sequence[int]) -> tuple[float, ...]:
    """Return what each contribution counts in the clipped mean; none where it is the plain mean.

    The centre is at any time a sum of contributions, each times a number. So all distances follow
    from the products of each two of them, and the tensors are read for these only.
    """
    counting = _bounded_shares(weights)
    count, plain = len(values), plain_shares(counting)
    products = [[0.0] * count for _ in range(count)]
    for i in range(count):
        for j in range(i + 1):
            products[i][j] = products[j][i] = float(torch.dot(values[i], values[j]))
    least = _ROUNDING * statistics.median_high(products[i][i] for i in range(count)) ** 0.5
    shares = [0.0] * count
    for _ in range(_CLIP_ITERATIONS):
        distances = _distances(products, shares)
        radius = max(statistics.median_high(distances), least)
        factors = [
            part if distance <= radius else part * radius / distance
            for part, distance in zip(plain, distances, strict=True)
        ]
        rest = 1.0 - sum(factors)
        shares = [rest * share + part for share, part in zip(shares, factors, strict=True)]
    distances = _distances(products, shares)
    if max(distances) <= _RADIUS * max(statistics.median_high(distances), least):
        return () if counting == [*weights] else plain
    return tuple(shares)


def _distances(products: Sequence[Sequence[float]], shares: Sequence[float]) -> list[float]:
    """Return how far each contribution is from the sum of all, each times its share."""
    to_centre = [_product(row, shares) for row in products]
    square = _product(to_centre, shares)
    return [
        max(0.0, products[i][i] - 2.0 * near + square) ** 0.5 for i, near in enumerate(to_centre)
    ]


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
