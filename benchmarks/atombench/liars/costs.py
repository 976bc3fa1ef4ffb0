"""What audits find of false means, and what the defences cost a member in a round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atombench.common import Result, progress
from atombench.swarm.outer_swarm import Replica, Task
from atomtrain.swarm.codecs.codec import Codec, codec_named, decode_span, encode_span, encoded_bytes
from atomtrain.swarm.codecs.slices import (
    Span,
    slice_spans,
    slices_per_member,
    streams_per_neighbour,
)
from atomtrain.swarm.membership.guards import Guard
from atomtrain.swarm.rounds.audits import Claim
from atomtrain.swarm.rounds.commitments import (
    Own,
    chunk_spans,
    committed,
    group_digest,
    sealed_text,
)
from atomtrain.swarm.transport.identity import Identity, verify
from atomtrain.swarm.transport.messages import Begin, Evidence, Mean, Seal, encode


@dataclass(frozen=True, kw_only=True)
class CostsSetup:
    """Of what the costs are measured."""

    fragment_elements: int = 25_000_000
    """Of the fragment whose audits are timed."""
    members: tuple[int, ...] = (4, 8)
    audits: int = 200
    wire: str = "float16"
    local_steps: int = 20
    """Between two rounds of a fragment."""
    step_tokens: int = 4096
    width: int = 256
    """Of the model one of whose steps is timed, per parameter."""


@dataclass(frozen=True, kw_only=True)
class _Owned:
    """A slice at its owner, and all that it can show."""

    begin: Begin
    values: list[Own]
    signatures: list[str]
    mean: Tensor
    codec: Codec
    guard: Guard

    def evidence(self, chunk: int) -> Evidence:
        """Return what is shown of a chunk beside its numbers."""
        return Evidence(
            signatures=tuple(self.signatures),
            paths=tuple(one.tree.path(chunk) for one in self.values),
        )

    @property
    def told(self) -> Mean:
        """What goes with the mean; a real signature is as long."""
        return Mean(
            contributors=tuple(range(len(self.values))), digest="00" * 16, shares=(),
            commitments=tuple(one.commitment.text for one in self.values), signature="00" * 64,
        )  # fmt: skip

    def claim(self) -> Claim:
        """Return the mean as a receiver judges it."""
        return Claim(
            begin=self.begin, owner=0, slice_index=0,
            owner_commitment=self.values[0].commitment.text, mean=self.told,
            values=self.mean, codec=self.codec, guard=self.guard,
        )  # fmt: skip

    def audit(self, chunk: int) -> str:
        """Return what a receiver of the mean finds."""
        start, stop = chunk_spans(self.mean.numel())[chunk]
        claim = self.claim()
        chunks = [one.values[start:stop].clone() for one in self.values]
        unproved = claim.unproved(chunk, self.evidence(chunk), chunks, verify)
        return unproved or claim.wrong(chunk, chunks)


def _owned(setup: CostsSetup, members: int, lie: Callable[[Tensor], Tensor]) -> _Owned:
    """Return a slice of a large fragment, whose owner sends what `lie` makes of its mean."""
    keys = [Identity.create() for _ in range(members)]
    begin = Begin(
        round_id="0-bench-0", members=tuple(key.peer_id for key in keys), weights=(1,) * members,
        late=(False,) * members, exchange_s=1.0, bases=False, version=0, tokens=0, groups=1,
    )  # fmt: skip
    slices = members * slices_per_member(setup.fragment_elements, members)
    elements = slice_spans(setup.fragment_elements, slices)[0].elements
    codec, generator = codec_named(setup.wire), torch.Generator().manual_seed(1)
    common = torch.randn(elements, generator=generator)
    values = [_decoded(codec, common + torch.randn(elements, generator=generator)) for _ in keys]
    guard = Guard(limit=10.0, mean="clipped")
    made = guard.mean_of({i: v.clone() for i, v in enumerate(values)}, begin.weights)
    mean_codec = codec.for_mean(members, 1)
    own = [committed(v) for v in values]
    signatures = [
        key.sign(sealed_text(group_digest(begin), 0, one.commitment.text)).hex()
        for key, one in zip(keys, own, strict=True)
    ]
    return _Owned(
        begin=begin, values=own, signatures=signatures,
        mean=_decoded(mean_codec, lie(made.values)), codec=mean_codec, guard=guard,
    )  # fmt: skip


def _decoded(codec: Codec, values: Tensor) -> Tensor:
    out = torch.empty_like(values)
    decode_span(codec, encode_span(codec, values), out)
    return out


def found_by_audits(setup: CostsSetup) -> list[Result]:
    def everywhere(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda mean: mean * factor

    def in_some(mean: Tensor) -> Tensor:
        false = mean.clone()
        for start, stop in chunk_spans(mean.numel())[::100]:
            false[start:stop] *= -1
        return false

    found: list[Result] = []
    for name, lie in (
        ("none", everywhere(1.0)), ("2% less everywhere", everywhere(0.98)),
        ("sign flipped everywhere", everywhere(-1.0)),
        ("sign flipped in one chunk of a hundred", in_some),
    ):  # fmt: skip
        owned = _owned(setup, setup.members[0], lie)
        chunks = len(chunk_spans(owned.mean.numel()))
        generator = torch.Generator().manual_seed(2)
        drawn = torch.randint(chunks, (setup.audits,), generator=generator).tolist()
        seen = sum(bool(owned.audit(chunk)) for chunk in drawn)
        found.append({"lie": name, "audits": setup.audits, "found": seen})
        progress(f"a mean with a lie of {name}: found by {seen} of {setup.audits} audits")
    return found


def defence_costs(setup: CostsSetup, members: int) -> Result:
    """Return what the defences of one round of a fragment cost each of so many members."""
    owned = _owned(setup, members, lambda mean: mean)
    elements, each = owned.mean.numel(), slices_per_member(setup.fragment_elements, members)
    slices, others = members * each, members - 1
    key = Identity.create()
    first, second = (one.values for one in owned.values[:2])
    seal_s = _time_s(lambda: committed(first))
    sign_s = _time_s(lambda: key.sign(b"x" * 80))
    check_s = _time_s(lambda: verify(key.peer_id, b"x" * 80, key.sign(b"x" * 80))) - sign_s
    audit_s = _time_s(lambda: owned.audit(0))
    told = owned.claim()
    length_s = _time_s(told.impossible)
    products_s = _time_s(lambda: float(torch.dot(first, second)))
    codec = codec_named(setup.wire)
    pieces, out = encode_span(codec, first), torch.empty_like(first)
    decode_s = _time_s(lambda: decode_span(codec, pieces, out))
    # Sealed are own slices, and contributions to all others; checked, others' to the own slices.
    sealed, checked = each + others * each, others * each
    audits = others * min(each, 2 * streams_per_neighbour(members, each))
    cpu_s = (
        sealed * seal_s + others * each * (sign_s + decode_s) + checked * (seal_s + check_s)
        + each * sign_s + others * each * (check_s + length_s)  # means are signed, and not too long
        + audits * audit_s + each * members * (members + 1) / 2 * products_s
    )  # fmt: skip
    span = Span(0, setup.fragment_elements)
    share = others / members
    moved = share * sum(encoded_bytes(c, span) for c in (codec, codec.for_mean(members, 0)))
    start, stop = chunk_spans(elements)[0]
    shown = members * 4 * (stop - start) + len(encode(owned.evidence(0)))
    seal = Seal(commitment=owned.values[0].commitment.text, signature=owned.signatures[0])
    extra = audits * shown + others * each * (len(encode(seal)) + len(encode(owned.told)))
    progress(
        f"{members} members: {cpu_s:.2f} s of processor time, {extra / moved:.2%} of the bytes"
    )
    return {
        "members": members,
        "slices": slices,
        "cpu_s": cpu_s,
        "cpu_s_per_million_elements": 1e6 * cpu_s / setup.fragment_elements,
        "moved_bytes": moved,
        "defence_bytes": extra,
        "bytes_share": extra / moved,
        "step_share": cpu_s / (setup.local_steps * _step_s(setup)),
        "seal_s": seal_s,
        "audit_s": audit_s,
    }


def _time_s(work: Callable[[], object]) -> float:
    """Return the median processor time of a piece of work, in seconds."""
    times_s = []
    for _ in range(5):
        begun_s = time.thread_time()
        work()
        times_s.append(time.thread_time() - begun_s)
    return sorted(times_s)[2]


def _step_s(setup: CostsSetup) -> float:
    """Return the processor time of a step of a model with as many parameters as the fragment.

    A small model's is measured: it grows with parameters and tokens.
    """
    task, sequences = Task(layers=4, width=setup.width, context=128), 4
    replica, text = Replica(task, 0), torch.randint(256, (20_000,))
    small_s = _time_s(lambda: replica.step(0, *task.batch(text, sequences, 0)))
    parameters = setup.fragment_elements / replica.values.numel()
    return small_s * parameters * setup.step_tokens / (sequences * task.context)
