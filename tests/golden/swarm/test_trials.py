"""Trials that refuse nothing change nothing: parameters, optimizer, dropout and anchors alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atomtrain.optimizers import AdamW
from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Anchor, Merge, Origin, digest_of, whole
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport, TrainerMailbox
from atomtrain.training.setup.peering import EngineFragments
from tests.support.swapped import gpt, swap, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")
TOKENS = 51


def trained(*, judged: bool, poisoned: bool = False, **options: Any) -> list[torch.Tensor]:
    """Train with dropout, and merge what two others send; return all numbers there are."""
    torch.manual_seed(5)
    model = gpt(dropout=0.2)
    own, *steps = token_batches(1, steps=8)
    calls = 0
    with swap(model, own[0], AdamW, **options) as engine:
        access = EngineFragments(engine, most=2)
        store = AnchorStore(access.elements, 1, 0.5)
        store.adopt_local(access)
        mailbox = TrainerMailbox(store, lambda steps, merges: None)

        def judge() -> float:
            nonlocal calls
            calls += 1
            return engine.evaluate(own)

        if judged:
            mailbox.use_judge(judge, lambda: 0.0)
        source = torch.Generator().manual_seed(3)
        reports: list[RoundReport] = []
        for number, micro_batches in enumerate(steps):
            engine.step(micro_batches)
            fragment = number % 2
            with access.view(fragment) as local:
                snapshot = store.snapshot(fragment, local, torch.empty(local.numel()))
            merge = _merge(store, snapshot, source, fetched=number == 4)
            report = RoundReport(round=number, fragment=fragment, version=1, outcome="averaged")
            mailbox.leave_merge(merge, report)
            if poisoned and number == 5:
                bad = torch.randn(snapshot.values.numel(), generator=torch.Generator())
                merge = _merge(store, snapshot, source, fetched=True, values=bad)
                mailbox.leave_merge(merge, report)
            reports += mailbox.boundary(
                steps=1, tokens=TOKENS, tokens_per_s=1.0, step_s=1.0, access=access
            )
        refused = [report for report in reports if report.outcome == "refused"]
        assert len(reports) == len(steps) + poisoned
        assert len(refused) == poisoned
        # What is refused is tried without own progress, too.
        assert calls == (2 * len(reports) + poisoned if judged else 0)
        engine.synchronize()
        kept = [*engine.state_dict().values(), *store.tensors().values(), torch.get_rng_state()]
        moments = [v for state in engine.optimizer_state().values() for v in state.values()]
        return [torch.as_tensor(value).clone() for value in (*kept, *moments)]


def _merge(
    store: AnchorStore,
    snapshot: Any,
    source: torch.Generator,
    *,
    fetched: bool,
    values: torch.Tensor | None = None,
) -> Merge:
    old = snapshot.anchor
    if values is None:
        # As large as what is bad, or that would be too far away to be tried.
        noise = torch.randn(old.values.numel(), generator=source) * 0.02
        values = (snapshot.values + old.values) / 2 + noise
    velocity = torch.full_like(values, 0.5)
    stamp = Stamp(old.stamp.version + 1, old.stamp.tokens + 100, digest_of(values, velocity))
    if fetched:
        stamp = Stamp(stamp.version + 1, stamp.tokens + 200, stamp.digest)
    anchor = Anchor(values, velocity, stamp, Origin("r", ()))
    spans = whole(values.numel())
    if fetched:
        return Merge(snapshot.fragment, anchor, spans, donor="donor")
    return Merge(snapshot.fragment, anchor, (), snapshot, spans)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}])
@pytest.mark.parametrize("poisoned", [False, True])
def test_a_run_with_trials_has_the_bits_of_one_without(
    options: dict[str, Any], poisoned: bool
) -> None:
    """Where something is refused, those of a run that never heard of it."""
    plain = trained(judged=False, **options)
    judged = trained(judged=True, poisoned=poisoned, **options)
    assert len(plain) == len(judged)
    assert all(torch.equal(one, other) for one, other in zip(plain, judged, strict=True))
