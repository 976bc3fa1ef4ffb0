"""Several replicas of a small model in one process, averaged by the swarm's own parts.

Snapshots, codecs with their residuals, guards, outer update and merges are those of real peers;
only the network is left out, so that many runs fit into minutes and repeat bit for bit.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from atomtrain.models import GPT, GPTConfig
from atomtrain.optimizers import decay_groups
from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Anchor, Merge, Snapshot, whole
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.anchors.updates import OuterUpdate
from atomtrain.swarm.codecs.codec import (
    codec_named,
    decode_span,
    decoded,
    encode_span,
    encoded_bytes,
)
from atomtrain.swarm.codecs.slices import Span, slice_spans
from atomtrain.swarm.membership.guards import Guard, bounded_weights
from atomtrain.swarm.rounds.owning import SliceReduction

_EVALUATED_SEQUENCES = 128
_HELD_OUT_SHARE = 0.05
Poison = Callable[[Tensor], Tensor]
"""What a liar contributes instead of its change."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learnt: the next byte of the standard library's source."""

    layers: int = 2
    width: int = 64
    context: int = 64
    steps: int = 400
    warmup_steps: int = 100
    learning_rate: float = 3e-3
    text_bytes: int = 4_000_000

    def model(self, seed: int) -> GPT:
        """Return the model with weights drawn from a seed."""
        torch.manual_seed(seed)
        return GPT(
            GPTConfig(
                layers=self.layers, width=self.width, heads=2, head_width=self.width // 2,
                vocabulary=256, context=self.context,
            )
        )  # fmt: skip

    def text(self) -> Tensor:
        """Return bytes as int64."""
        found = b""
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            found += path.read_bytes()
            if len(found) > self.text_bytes:
                break
        return torch.frombuffer(bytearray(found[: self.text_bytes]), dtype=torch.uint8).long()

    def batch(self, text: Tensor, sequences: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, drawn from the first part of the text."""
        generator = torch.Generator().manual_seed(seed)
        last = int(text.numel() * (1 - _HELD_OUT_SHARE)) - self.context - 1
        starts = torch.randint(last, (sequences, 1), generator=generator)
        tokens = text[starts + torch.arange(self.context + 1)]
        return tokens[:, :-1], tokens[:, 1:]

    def held_out(self, text: Tensor, sequences: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, drawn from the last part of the text."""
        first = int(text.numel() * (1 - _HELD_OUT_SHARE))
        last = text.numel() - self.context - 1
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(first, last, (sequences, 1), generator=generator)
        tokens = text[starts + torch.arange(self.context + 1)]
        return tokens[:, :-1], tokens[:, 1:]

    def rate_at(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then linear to a tenth."""
        done = max(0.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * (1 - 0.9 * done)


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """How replicas are averaged."""

    outer: OuterUpdate
    local_steps: int = 20
    fragments: int = 4
    wire: str = "int4"
    mean: str = "plain"
    norm_limit: float = 10.0
    overlap_steps: int = 1
    """Steps from a snapshot to its merge."""
    overlap_weight: float = 1.0


class Replica:
    """One model, its optimizer, and all its parameters in one vector."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.model = task, task.model(seed)
        parameters = list(self.model.parameters())
        self.values = torch.cat([p.detach().reshape(-1) for p in parameters])
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            parameter.data = self.values[start:stop].view(parameter.shape)
            start = stop
        self._optimizer = torch.optim.AdamW(
            decay_groups(self.model, 0.1), lr=task.learning_rate, betas=(0.9, 0.95), fused=True
        )

    def step(self, step: int, inputs: Tensor, labels: Tensor) -> None:
        """Make one optimizer step."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.task.rate_at(step)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.model(inputs, labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def loss(self, text: Tensor) -> float:
        """Return the loss on the last part of the text."""
        tail = text[int(text.numel() * (1 - _HELD_OUT_SHARE)) :]
        stride = (tail.numel() - self.task.context - 1) // _EVALUATED_SEQUENCES
        starts = torch.arange(_EVALUATED_SEQUENCES).unsqueeze(1) * stride
        tokens = tail[starts + torch.arange(self.task.context + 1)]
        with torch.no_grad():
            return float(self.model(tokens[:, :-1], tokens[:, 1:]).loss)


def train_alone(task: Task, text: Tensor, sequences: int, seed: int) -> float:
    """Return the final loss of one peer."""
    replica = Replica(task, seed)
    for step in range(task.steps):
        replica.step(step, *task.batch(text, sequences, seed * 1_000_003 + step))
    return replica.loss(text)


class LocalSwarm:
    """Peers that train by turns and average as a swarm does."""

    def __init__(
        self, task: Task, averaging: Averaging, peers: int, seed: int,
        poison: Poison | None = None,
    ) -> None:  # fmt: skip
        """With `poison`, the last peer contributes what it makes of its changes."""
        self._task, self._how, self._seed, self._poison = task, averaging, seed, poison
        self._honest = peers - (poison is not None)
        self.replicas = [Replica(task, seed) for _ in range(peers)]
        self._spans = slice_spans(self.replicas[0].values.numel(), averaging.fragments)
        sizes = tuple(span.elements for span in self._spans)
        self._codec = codec_named(averaging.wire)
        momentum = averaging.outer.momentum > 0
        self._stores = [
            AnchorStore(sizes, momentum, averaging.overlap_weight) for _ in range(peers)
        ]
        for store in self._stores:
            for fragment, span in enumerate(self._spans):
                values = self.replicas[0].values[slice(*span)].clone()
                store.place(fragment, store.fresh(values, version=0, tokens=0))
        self._waiting: list[tuple[int, list[Merge]]] = []
        self._round = 0
        self._usual_rms: dict[int, float] = {}
        self.sent_bytes = 0.0
        """What each peer would have sent: its contributions, and means to the others."""

    def train(self, text: Tensor, sequences: int) -> float:
        """Return the final loss of the anchors, of `sequences` a peer and step."""
        task, peers = self._task, len(self.replicas)
        between = max(1, self._how.local_steps // self._how.fragments)
        for step in range(task.steps):
            for index, replica in enumerate(self.replicas):
                seed = (self._seed * 1_000_003 + step) * peers + index
                replica.step(step, *task.batch(text, sequences, seed))
                self._stores[index].tokens_seen += sequences * task.context
            self._merge(step)
            if (step + 1) % between == 0:
                self._average(step)
        self._merge(task.steps + self._how.overlap_steps)
        self._settle()
        return self.replicas[0].loss(text)

    def _settle(self) -> None:
        """Average every fragment once more, as peers do after their last step."""
        for _ in self._spans:
            self._average(self._task.steps)
            self._merge(self._task.steps + self._how.overlap_steps)

    def _average(self, step: int) -> None:
        fragment = self._round % len(self._spans)
        local = [replica.values[slice(*self._spans[fragment])] for replica in self.replicas]
        taken = [
            store.snapshot(fragment, values, torch.empty_like(values))
            for store, values in zip(self._stores, local, strict=True)
        ]
        weights = [*bounded_weights([snapshot.weight for snapshot in taken])]
        guard = Guard(limit=self._how.norm_limit, mean=self._how.mean)
        reduction = SliceReduction(local[0].numel(), weights, guard)
        contributions: list[Tensor] = []
        for index, snapshot in enumerate(taken):
            if index < self._honest:
                taken[index], sent = self._sent(snapshot)
            else:
                sent = self._poisoned(snapshot)
            contributions.append(sent)
        own_square = float(contributions[0].square().mean())
        for index, sent in enumerate(contributions):
            reduction.add(index, sent)
        contributors, mean = reduction.close()
        if mean is not None and self._vetoed(guard, fragment, mean, own_square, weights):
            mean = None
        merges = self._merges(fragment, taken, contributors, mean)
        self._waiting.append((step + self._how.overlap_steps, merges))
        span = Span(0, local[0].numel())
        codecs = (self._codec, self._codec.for_mean(len(contributors), self._round))
        share = (len(local) - 1) / len(local)
        self.sent_bytes += share * sum(encoded_bytes(codec, span) for codec in codecs)
        self._round += 1

    def _vetoed(
        self, guard: Guard, fragment: int, mean: Tensor, own_square: float, weights: list[int]
    ) -> bool:
        """Say whether the first peer, as all honest ones, refuses a mean; else remember its size.

        At the end of a run one peer may be the only one that has something left to give.
        """
        mean_rms = float(mean.square().mean()) ** 0.5
        usual_rms = self._usual_rms.get(fragment, 0.0)
        if guard.mean_too_large(mean_rms, own_square**0.5, usual_rms, weights[0], weights):
            return True
        self._usual_rms[fragment] = mean_rms
        return False

    def _poisoned(self, snapshot: Snapshot) -> Tensor:
        assert self._poison is not None, "only liars are poisoned"
        return self._poison(snapshot.contribution(Span(0, snapshot.values.numel())))

    def _sent(self, snapshot: Snapshot) -> tuple[Snapshot, Tensor]:
        values = snapshot.contribution(Span(0, snapshot.values.numel()))
        sent = decoded(self._codec, encode_span(self._codec, values.clone()), values.numel())
        lost = values - sent if self._codec.feedback else None
        return replace(snapshot, lost=lost), sent

    def _merges(
        self,
        fragment: int,
        taken: Sequence[Snapshot],
        contributors: tuple[int, ...],
        mean: Tensor | None,
    ) -> list[Merge]:
        if mean is None:
            return []
        codec = self._codec.for_mean(len(contributors), self._round)
        travelled = encode_span(codec, mean)
        if not codec.exact:
            decode_span(codec, travelled, mean)
        old = taken[0].anchor
        values, velocity = old.values.clone(), old.velocity
        if velocity is not None:
            velocity = velocity.clone()
        self._how.outer.apply(values, mean, velocity)
        everywhere = whole(values.numel())
        anchor = Anchor(values, velocity, Stamp(old.stamp.version + 1, 0, ""))
        return [
            Merge(fragment, anchor, (), snapshot, everywhere)
            if index in contributors
            else Merge(fragment, anchor, everywhere)
            for index, snapshot in enumerate(taken)
        ]

    def _merge(self, step: int) -> None:
        for due, merges in self._waiting:
            if due > step:
                continue
            for merge, store, replica in zip(merges, self._stores, self.replicas, strict=False):
                store.merge(merge, replica.values[slice(*self._spans[merge.fragment])])
        self._waiting = [entry for entry in self._waiting if entry[0] > step]
