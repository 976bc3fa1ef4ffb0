"""What a run would be: data, plan, time and disk, told before anything is trained or written."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import torch

from atomtrain.data.labels import in_words
from atomtrain.data.sampler import Batch
from atomtrain.engine.calibration.profiling import crowding_warning
from atomtrain.errors import ConfigError
from atomtrain.models.hugging_face import HuggingFaceConfig
from atomtrain.models.making import parameter_count
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.setup.setup import Session, open_session
from atomtrain.units import counted, format_bytes, format_count, format_seconds

_CHECKPOINTS_AT_ONCE = 3
"""Two are kept, and the next one is complete before the older of them goes."""
_SHOWN_TOKENS = 64


def dry_run(options: TrainOptions) -> str:
    """Open a run as `atom train` would, and return what there is to tell of it, as lines.

    Raises:
        AtomError: any mistake that the run itself would refuse.
    """
    if options.resume or options.join:
        raise ConfigError("--dry-run looks at new runs; leave --resume and --join out")
    with tempfile.TemporaryDirectory() as folder:
        # Nobody is to join what ends at once, and no folder of a run is to be left.
        session = open_session(
            dataclasses.replace(options, run=None, trace=None, directory=Path(folder))
        )
        try:
            rows = [*_model(session), *_data(session), *_plan(session)]
            rows.append(_disk(session, options.directory))
        finally:
            session.close()
    width = max(len(key) for key, _ in rows) + 2
    lines = [f"{key:<{width}}{value}" for key, value in rows]
    return "\n".join(["dry run: no run is begun", *lines, ""])


def _model(session: Session) -> list[tuple[str, str]]:
    recipe, engine = session.recipe, session.engine
    micro_batches = recipe.sequences // session.fit.micro_batch
    return [
        (
            "model",
            f"{recipe.model}: {format_count(parameter_count(session.model))} parameters, "
            f"{format_bytes(engine.state_bytes)} of state",
        ),
        (
            "step",
            f"{recipe.tokens_per_step:,} tokens: {counted(micro_batches, 'micro-batch', 'es')} of "
            f"{counted(session.fit.micro_batch, 'sequence')} of {recipe.context:,} tokens",
        ),
        ("learning", f"{recipe.optimizer}, {recipe.schedule}, up to {recipe.learning_rate:g}"),
        ("precision", recipe.precision),
    ]


def _data(session: Session) -> list[tuple[str, str]]:
    epochs = session.sampler.epoch(session.recipe.steps)
    rows = [("data", f"{session.text.named}, seen {epochs:.2f} times")]
    if (laid := session.sampler.laid) is not None:
        fills = f", {laid.filled_share:.1%} filled" if session.recipe.packed else ""
        told = (
            f"{laid.sequences} of {laid.rows} rows{fills}, {laid.cut} cut, {laid.dropped} left out"
        )
        rows.append(("sequences", told))
    if session.recipe.objective == "classify":
        assert isinstance(session.recipe.sizes, HuggingFaceConfig)
        rows.append(("labels", in_words(session.recipe.sizes.labels or ())))
    if session.text.skipped is not None:
        rows.append(("skipped", session.text.skipped))
    first = _sample(session.sampler.batch(0))
    text = session.text.tokenizer.decode(first.tolist())
    return [*rows, ("sample", repr(text))]


def _sample(batch: Batch) -> torch.Tensor:
    return batch.inputs[0, :_SHOWN_TOKENS]


def _plan(session: Session) -> list[tuple[str, str]]:
    plan, recipe = session.engine.plan, session.recipe
    total_s = plan.step_s * recipe.steps
    warning = crowding_warning(session.engine.planner.crowded_share)
    return [
        (
            "device",
            f"{format_bytes(plan.device_peak_bytes)} of "
            f"{format_bytes(plan.device_memory_bytes)}, {counted(plan.segments, 'segment')}",
        ),
        ("host", format_bytes(plan.host_bytes)),
        (
            "speed",
            f"{format_seconds(plan.step_s)} a step, "
            f"{format_count(recipe.tokens_per_step / plan.step_s)} tokens/s, bound by {plan.bound}",
        ),
        ("time", f"{counted(recipe.steps, 'step')} in about {format_seconds(total_s)}"),
        *([("warning", warning)] if warning else []),
    ]


def _disk(session: Session, directory: Path) -> tuple[str, str]:
    """Return what checkpoints take at most: parameters as float32, and the optimizer's state."""
    updates = session.engine.planner.updates
    assert updates is not None
    checkpoint_bytes = 4 * session.engine.parameters + updates.host_bytes - updates.scratch_bytes
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    needed_bytes = _CHECKPOINTS_AT_ONCE * checkpoint_bytes
    free_bytes = shutil.disk_usage(place).free
    note = "" if needed_bytes <= free_bytes else ": too little"
    return "disk", (
        f"up to {format_bytes(needed_bytes)} of checkpoints, {format_bytes(free_bytes)} free in "
        f"{directory}{note}"
    )
