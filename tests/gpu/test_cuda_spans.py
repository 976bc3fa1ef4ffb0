"""Measured spans on a real GPU: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

import atomtrain
from atomtrain.models import GPT, GPTConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = GPTConfig(layers=6, width=256, heads=4, head_width=64, vocabulary=1024, context=128)


def test_device_and_host_spans_share_one_clock() -> None:
    torch.manual_seed(0)
    ids = torch.randint(1024, (4, 128))
    batch = {"input_ids": ids, "labels": ids}
    with atomtrain.swap(
        GPT(CONFIG),
        batch,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        device="cuda",
        device_memory="256MiB",
        # Else all of so small a model would stay on the device.
        options=atomtrain.Options(
            micro_batches=2, segments=4, host_layers=0, optimizer_on_device=False
        ),
    ) as engine:
        engine.step([batch, batch])
        engine.recording = True
        engine.step([batch, batch])
        assert engine.last is not None
        spans, step_s = engine.last_spans(), engine.last.step_s
    computed = {span.label: span for span in spans if span.stream == "compute"}
    begun_s = min(span.start_s for span in spans)
    for span in spans:
        assert span.end_s >= span.start_s
        if span.stream == "compute":
            assert span.end_s <= begun_s + 2 * step_s
        if span.stream == "load" and span.label in computed:
            assert span.end_s <= computed[span.label].start_s + 1e-4
        if span.stream == "unload":
            assert span.start_s >= computed[span.label].end_s - 1e-4
    # Host updates, timed by the host's clock, come after the copies that the GPU timed.
    unloaded_s = min(span.end_s for span in spans if span.stream == "unload")
    assert min(span.start_s for span in spans if span.stream == "update") >= unloaded_s - 1e-3
