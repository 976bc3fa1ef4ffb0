"""Measured spans of real steps: same streams and labels as predicted, bits unchanged."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

import atomtrain
from atomtrain.engine.engine import Engine
from atomtrain.engine.options import Options
from atomtrain.models import GPT, GPTConfig

CONFIG = GPTConfig(layers=5, width=32, heads=2, head_width=16, vocabulary=97, context=16)


def engine_of(clip_norm: float | None = None, host_layers: int | None = None) -> Engine:
    torch.manual_seed(0)
    return atomtrain.swap(
        GPT(CONFIG),
        batch(0),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        device="emulated:1GiB/s",
        device_memory="4MiB",
        options=Options(
            micro_batches=2,
            segments=4,
            slots=2,
            clip_norm=clip_norm,
            host_layers=host_layers,
            profile=False,
            optimizer_on_device=False,
        ),
    )


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("host_layers", [0, 1])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_step_has_the_spans_that_were_predicted(
    clip_norm: float | None, host_layers: int
) -> None:
    with engine_of(clip_norm, host_layers) as engine:
        engine.recording = True
        engine.step([batch(1), batch(2)])
        measured, predicted = engine.last_spans(), engine.predicted_spans()
    labels = {(s.stream, s.label) for s in measured if "next step" not in s.label}
    for stream in ("compute", "load", "unload", "update"):
        wanted = {span.label for span in predicted if span.stream == stream}
        assert wanted, stream
        assert {label for s, label in labels if s == stream} == wanted, stream
        if host_layers:
            assert ("forward 0" in wanted) == ("backward 0" in wanted) == (stream == "update")
    # Each visit computes once, and loads what the schedule says.
    for stream in ("compute", "unload"):
        assert Counter(s.label for s in measured if s.stream == stream) == Counter(
            s.label for s in predicted if s.stream == stream
        )


def test_spans_of_one_stream_do_not_overlap_and_follow_the_data() -> None:
    with engine_of() as engine:
        engine.recording = True
        engine.step([batch(1), batch(2)])
        spans = engine.last_spans()
    for stream in {span.stream for span in spans}:
        own = [span for span in spans if span.stream == stream]
        for before, after in itertools.pairwise(own):
            assert before.end_s <= after.start_s
    computed = {span.label: span for span in spans if span.stream == "compute"}
    for span in spans:
        if span.stream == "load" and span.label in computed:
            assert span.end_s <= computed[span.label].start_s
        if span.stream == "unload":
            assert span.start_s >= computed[span.label].end_s


def test_each_step_has_its_own_spans_and_none_without_recording() -> None:
    with engine_of() as engine:
        assert engine.last_spans() == ()
        engine.step([batch(1), batch(2)])
        assert engine.last_spans() == ()
        engine.recording = True
        engine.step([batch(1), batch(2)])
        first = engine.last_spans()
        engine.step([batch(3), batch(4)])
        engine.evaluate([batch(5)])
        second = engine.last_spans()
        assert Counter(s[:2] for s in first) == Counter(s[:2] for s in second)
        assert min(s.start_s for s in second) > min(s.start_s for s in first)
        engine.recording = False
        engine.step([batch(1), batch(2)])
        assert engine.last_spans() == ()


def test_recording_changes_no_bit() -> None:
    states = []
    for recording in (False, True):
        with engine_of(clip_norm=0.1) as engine:
            engine.recording = recording
            for seed in range(3):
                engine.step([batch(seed), batch(seed + 10)])
            states.append({name: value.clone() for name, value in engine.state_dict().items()})
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
