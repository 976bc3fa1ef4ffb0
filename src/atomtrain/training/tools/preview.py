"""What a run would be and learn from (data, plan, time, disk), told before anything is trained."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from atomtrain.data.examples import Part
from atomtrain.data.labels import in_words
from atomtrain.data.material import ExampleMaterial, PairMaterial, TextMaterial
from atomtrain.data.sampler import windows_per_epoch
from atomtrain.data.tokenizer import Tokenizer, read_tokenizer
from atomtrain.engine.calibration.profiling import crowding_warning
from atomtrain.errors import ConfigError
from atomtrain.files import existing
from atomtrain.models import Sizes, preset
from atomtrain.models.hugging_face import (
    HuggingFaceConfig,
    is_hugging_face,
    model_folder,
    read_config,
)
from atomtrain.models.making import parameter_count
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.setup.setup import Session, open_session
from atomtrain.training.setup.texts import has_pairs, read_text
from atomtrain.units import counted, format_bytes, format_count, format_seconds

_CHECKPOINTS_AT_ONCE = 3
"""Two are kept, and the next one is complete before the older of them goes."""
_SAMPLE_TOKENS = 64


def dry_run(options: TrainOptions) -> str:
    """Open a run as `atom train` would, and return what there is to tell of it, as lines.

    Raises:
        AtomError: any mistake that the run itself would refuse.
    """
    if options.resume or options.join:
        raise ConfigError("--dry-run looks at new runs; leave --resume and --join out")
    with tempfile.TemporaryDirectory() as folder:
        # Nobody is to join what ends at once, and no folder of a run is to be left.
        told: list[str] = []
        session = open_session(
            dataclasses.replace(options, run=None, trace=None, directory=Path(folder)), told.append
        )
        try:
            rows = [*_model(session), *_data(session), *_plan(session)]
            rows.append(_disk(session, options.directory))
            rows += [("note", line) for line in told]
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
    first = session.sampler.batch(0).inputs[0, :_SAMPLE_TOKENS]
    text = session.text.tokenizer.decode(first.tolist())
    return [*rows, ("sample", repr(text))]


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
        *([("plan", before)] if (before := session.engine.planner.before) else []),
        ("layers", str(session.engine.compiling)),
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
    needed_bytes = _CHECKPOINTS_AT_ONCE * checkpoint_bytes
    free_bytes = shutil.disk_usage(existing(directory)).free
    note = "" if needed_bytes <= free_bytes else ": too little"
    return "disk", (
        f"up to {format_bytes(needed_bytes)} of checkpoints, {format_bytes(free_bytes)} free in "
        f"{directory}{note}"
    )


_SHOWN_TOKENS = 200


def inspect(
    data: str, model: str, context: int, *, packed: bool = False, samples: int = 1
) -> dict[str, Any]:
    """Return plain JSON values: counts, and `samples`, texts with answers in double brackets.

    Raises:
        AtomError: data or model cannot be read; names file and line.
    """
    sizes, tokenizer = _known_of(model)
    text = read_text(
        [data], sizes, tokenizer, packed=packed, learns="pairs" if has_pairs([data]) else "answers"
    )
    tokenizer, [material] = text.tokenizer, text.material.sources
    if isinstance(material, TextMaterial):
        tokens = material.tokens
        shown = tokens.train[:_SHOWN_TOKENS].tolist()
        return {
            "kind": "text",
            "train_tokens": len(tokens.train),
            "held_out_tokens": len(tokens.held_out),
            "train_bytes": tokens.train_bytes,
            "skipped_rows": text.skipped_rows,
            "sequences": windows_per_epoch(len(tokens.train), context),
            # Both parts need a sequence, and the last one's label.
            "longest_context": max(0, min(len(tokens.train), len(tokens.held_out)) - 1),
            "samples": [tokenizer.decode(shown)][:samples],
        }
    assert isinstance(material, ExampleMaterial | PairMaterial)
    if isinstance(material, PairMaterial):
        found = _pairs(material, tokenizer, context, samples)
        return {**found, "skipped_rows": text.skipped_rows}
    examples = material.examples
    rows = material.train(context)
    return {
        "kinds": examples.counts.kinds,
        "skipped_rows": text.skipped_rows,
        "examples": examples.counts.examples,
        "held_out": examples.held_out.count,
        "tokens": examples.counts.tokens,
        "answer_tokens": examples.counts.answer_tokens,
        "longest_tokens": examples.counts.longest_tokens,
        "sequences": len(rows),
        "cut": rows.cut,
        "dropped": rows.dropped,
        "filled_share": round(rows.laid.filled_share, 4),
        "samples": [
            _marked(examples.train, index, tokenizer)
            for index in range(min(samples, examples.train.count))
        ],
    }


def _known_of(model: str) -> tuple[Sizes, Tokenizer | None]:
    """Return a model's sizes and tokenizer; a preset has none yet: it is trained on the text."""
    if not is_hugging_face(model):
        return preset(model), None
    folder = model_folder(model, weights=False)
    sizes, tokenizer = read_config(folder), read_tokenizer(folder)
    tokenizer.check_room(sizes.vocabulary, str(folder))
    return sizes, tokenizer


def _pairs(
    material: PairMaterial, tokenizer: Tokenizer, context: int, samples: int
) -> dict[str, Any]:
    examples, rows = material.examples, material.train(context)
    shown = range(min(2 * samples, examples.train.count))
    return {
        "kinds": {kind: count // 2 for kind, count in examples.counts.kinds.items()},
        "pairs": examples.counts.examples // 2,
        "held_out": examples.held_out.count // 2,
        "tokens": examples.counts.tokens,
        "answer_tokens": examples.counts.answer_tokens,
        "longest_tokens": examples.counts.longest_tokens,
        "sequences": 2 * len(rows),
        "cut": rows.cut,
        "dropped": rows.dropped,
        "samples": [
            ("rejected: " if index % 2 else "chosen: ") + _marked(examples.train, index, tokenizer)
            for index in shown
        ],
    }


def _marked(part: Part, index: int, tokenizer: Tokenizer) -> str:
    start, stop = int(part.starts[index]), int(part.starts[index + 1])
    stop = min(stop, start + _SHOWN_TOKENS)
    pairs = zip(part.tokens[start:stop].tolist(), part.answers[start:stop].tolist(), strict=True)
    pieces = []
    for answer, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run])
        pieces.append(f"[[{text}]]" if answer else text)
    return "".join(pieces)
