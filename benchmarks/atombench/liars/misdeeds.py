"""What members may lie about: contributions, means, anchors. Tests' liars are made of these, too.

Each function spoils one peer, by what it holds: the rest of the peer is the package as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Anchor, Merge, Snapshot, digest_of
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.codecs.codec import decode_span
from atomtrain.swarm.rounds.commitments import mean_text
from atomtrain.swarm.rounds.owning import OwnedSlice, mean_codec
from atomtrain.swarm.transport.transport import Channel

Poison = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What a liar contributes: of its own change, the honest peers' mean, and their deviations."""
Knows = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Returns mean and deviations of a fragment, given the liar's own change."""
_LARGEST = 2**53 - 1
_HUGE_CLAIM = 1_000_000
_HASHES_TRIED = 1000
_A_LITTLE = 1.0
"""Standard deviations by which "a little is enough" shifts the mean (Baruch et al. 2019)."""
_DRIFT = 0.5
"""Part of the change's root mean square by which a drift is off, each time the same way."""


@dataclass(frozen=True)
class Contributing:
    """What a liar contributes, and how many times its tokens it claims."""

    poison: Poison
    claims: int = 1


def _drifting(change: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    way = torch.randn(change.shape, generator=torch.Generator().manual_seed(1)).sign()
    return change + _DRIFT * change.square().mean().sqrt() * way


CONTRIBUTIONS: dict[str, Contributing] = {
    "sign flipped": Contributing(lambda change, *_: -change),
    "-9 times": Contributing(lambda change, *_: -9 * change),
    "constant": Contributing(lambda change, *_: torch.full_like(change, 3.0)),
    "noise": Contributing(
        lambda change, *_: torch.randn_like(change) * change.square().mean().sqrt()
    ),
    "nothing": Contributing(lambda change, *_: torch.zeros_like(change)),
    "next to nothing": Contributing(lambda change, *_: 1e-4 * change),
    "against the mean": Contributing(lambda _, mean, __: -mean),
    "a little": Contributing(lambda _, mean, deviation: mean - _A_LITTLE * deviation),
    "slow drift": Contributing(_drifting),
    "a million times the tokens": Contributing(lambda change, *_: -change, _HUGE_CLAIM),
}
CLAIMS: dict[str, tuple[int, int]] = {
    "tokens": (1, 2**52),
    "many tokens": (1, 2**49),
    "versions": (2**39, 10**9),
    "NaN": (1, 10**9),
    "largest": (0, _LARGEST),
    "a little better": (1, 300),
    "the lower hash": (0, 0),
}
"""What a liar says of its anchors: how many more versions, and tokens, they have than it has. Their
values are random ones, but for `largest`: those are the true ones."""


def contribute(store: AnchorStore, what: Contributing, knows: Knows | None = None) -> None:
    """Have a peer contribute otherwise than it learns, and go on from what it has learnt.

    What it does not know of the others' changes it takes from how the last round moved the anchor.
    """
    take, merge = store.snapshot, store.merge
    true: dict[int, tuple[Tensor, Tensor]] = {}
    before: dict[int, Tensor] = {}

    def last_moved(fragment: int, change: Tensor) -> tuple[Tensor, Tensor]:
        now = store.anchor(fragment).values
        mean = now - before.get(fragment, now)
        before[fragment] = now
        return mean, (change - mean).abs()

    def snapshot(fragment: int, local: Tensor, into: Tensor) -> Snapshot:
        taken = take(fragment, local, into)
        change = taken.values - taken.anchor.values
        false = what.poison(change, *(knows or last_moved)(fragment, change))
        values = taken.anchor.values + false
        true[fragment] = values, taken.values
        return replace(taken, values=values, weight=taken.weight * what.claims)

    def keep_learnt(made: Merge, local: Tensor) -> None:
        false, learnt = true.get(made.fragment, (None, None))
        if made.snapshot is not None and learnt is not None and made.snapshot.values is false:
            made = replace(made, snapshot=replace(made.snapshot, values=learnt))
        merge(made, local)

    store.snapshot = snapshot  # type: ignore[method-assign]
    store.merge = keep_learnt  # type: ignore[assignment,method-assign]


def claim(store: AnchorStore, what: str, near: float = 0.0) -> None:
    """Have a peer tell all others of anchors that nobody has made, and give them to who asks.

    With `near` the values are those that it has, each up or down by so much.
    """
    versions, tokens = CLAIMS[what]
    true, told = store.anchor, dict[str, Anchor]()

    def anchor(fragment: int) -> Anchor:
        real = true(fragment)
        if real.stamp.digest not in told:
            values = real.values if what == "largest" else _false(real, near)
            if what == "NaN":
                values[0] = float("nan")
            if what == "the lower hash":
                values = _ground(real, near)
            stamp = Stamp(
                real.stamp.version + versions,
                min(real.stamp.tokens + tokens, _LARGEST),
                digest_of(values, real.velocity),
            )
            told[real.stamp.digest] = Anchor(values, real.velocity, stamp)
        return told[real.stamp.digest]

    store.anchor = anchor  # type: ignore[method-assign]
    store.stamps = lambda: tuple(  # type: ignore[method-assign]
        anchor(fragment).stamp for fragment in range(len(store.fragment_elements))
    )


def _false(real: Anchor, near: float) -> Tensor:
    drawn = torch.randn(real.values.shape)
    return real.values + near * drawn.sign() if near else drawn


def _ground(real: Anchor, near: float) -> Tensor:
    """Return false values with a lower hash than an anchor's, if so many tries find some.

    Two liars that outdo each other would try for ever; then the true values are told.
    """
    for _ in range(_HASHES_TRIED):
        values = _false(real, near)
        if digest_of(values, real.velocity) < real.stamp.digest:
            return values
    return real.values


Encode = Callable[[OwnedSlice, tuple[int, ...], Tensor], Any]
Answer = Callable[[OwnedSlice, Channel], Awaitable[None]]


def false_mean(encode: Encode, lies: Callable[[OwnedSlice], bool], factor: float) -> Encode:
    """Return what owners that lie do in place of `OwnedSlice._encode`: a mean times a factor."""

    def encoded(owned: OwnedSlice, contributors: tuple[int, ...], mean: Tensor) -> Any:
        return encode(owned, contributors, mean * factor if lies(owned) else mean)

    return encoded


def two_means(
    answer: Answer, encode: Encode, lies: Callable[[OwnedSlice, Channel], bool]
) -> Answer:
    """Return what owners do in place of `OwnedSlice.answer` that give some another mean, signed."""

    async def answered(owned: OwnedSlice, channel: Channel) -> None:
        out = await asyncio.shield(owned._mean)
        if not out.pieces or not lies(owned, channel):
            await answer(owned, channel)
            return
        counted = out.header.contributors
        mean = torch.empty(owned._place.numel())
        decode_span(mean_codec(owned._codec, owned._begin, owned._index, len(counted)),
                    out.pieces, mean)  # fmt: skip
        pieces, held = encode(owned, counted, mean.neg_())
        header = msgspec.structs.replace(out.header, digest=held.digest)
        signature = owned._sign(mean_text(owned._group, owned._index, header)).hex()
        await channel.send(msgspec.structs.replace(header, signature=signature))
        for piece in pieces:
            await channel.send_bytes(piece)

    return answered
