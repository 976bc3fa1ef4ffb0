"""A checkpoint of a session: what it holds beside the model, and where it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from atomtrain.checkpoint import save
from atomtrain.events import EventLog
from atomtrain.training.config.folders import CHECKPOINTS
from atomtrain.training.setup.setup import Session
from atomtrain.training.setup.sources import guards_of
from atomtrain.training.setup.state import SWARM_SHARD, loss_scale_of, shards_of


def save_session(session: Session, events: EventLog) -> Path:
    """Write a checkpoint of the session as it is now, and tell of it; return its folder.

    Waits for the last step's updates.
    """
    started_s = time.monotonic()
    meta: dict[str, Any] = {
        "recipe": session.recipe.to_json(),
        "separator": session.text.tokenizer.separator_text,
        "tokens": session.tokens,
        "micro_batch": session.fit.micro_batch,
        "head_pieces": session.fit.head_pieces,
        "loss_scale": loss_scale_of(session.engine),
        "data": list(session.text.data),
        "validation": session.text.validation,
        "model_folder": _text_of(session.model_folder),
        "text_sha256": session.text.sha256,
        "run": session.run,
        "guards": guards_of(session.options),
        "name": session.name,
    }
    swarm = None if session.swarm is None else session.swarm.state_dict()
    if swarm is not None:
        meta["swarm"] = swarm.meta

    def shards() -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        yield from shards_of(session.engine)
        if swarm is not None:
            yield SWARM_SHARD, swarm.tensors

    texts = {"tokenizer.json": session.text.tokenizer.to_json()}
    path = save(session.directory / CHECKPOINTS, session.step, shards(), meta, texts)
    events.emit(
        "checkpoint",
        step=session.step,
        path=str(path),
        bytes=sum(file.stat().st_size for file in path.iterdir()),
        duration_s=time.monotonic() - started_s,
    )
    return path


def newest(session: Session) -> Path:
    """Return the checkpoint that was written at the session's step."""
    folder = session.directory / CHECKPOINTS
    return max(folder.glob(f"step-{session.step:08d}*"))


def _text_of(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
