"""`kill -9` of a process that saves, at random moments and at every call that changes the disk."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain import checkpoint
from atomtrain.checkpoint import writer

KILLS = 20
DEADLINE_S = 600.0


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """A server that has torch loaded forks each child in milliseconds, without this one's state."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["torch", "atomtrain.checkpoint"])
    return forking


def save_step(folder: Path, step: int) -> None:
    shards = {f"segment {i}": {"w": torch.full((64,), step * 10 + i)} for i in range(3)}
    checkpoint.save(folder, step, shards, {"step": step}, {"tokenizer.json": str(step)})


def check_loadable(folder: Path) -> int:
    """Load what is left, compare all of it with what was saved, and return its step."""
    loaded = checkpoint.load_latest(folder)
    assert loaded.skipped == (), "a killed writer must not leave a damaged checkpoint"
    step = loaded.step
    assert loaded.meta == {"step": step}
    assert loaded.texts == {"tokenizer.json": str(step)}
    for index, (name, tensors) in enumerate(loaded.shards()):
        assert name == f"segment {index}"
        assert torch.equal(tensors["w"], torch.full((64,), step * 10 + index))
    return step


def save_for_ever(folder: Path, first: int) -> None:
    step = first
    while True:
        save_step(folder, step)
        step += 1


def wait_until(condition: Callable[[], bool], process: BaseProcess) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.exitcode is None, "the saving process ended by itself"
        assert time.monotonic() < give_up, "the saving process saved nothing"
        time.sleep(0.002)


def test_a_loadable_checkpoint_is_left_by_every_kill(
    tmp_path: Path, context: ForkServerContext
) -> None:
    chance = random.Random(20)
    last = 0
    save_step(tmp_path, last)
    steps = []
    for _ in range(KILLS):
        process = context.Process(target=save_for_ever, args=(tmp_path, last + 1))
        process.start()
        try:
            first = tmp_path / f"step-{last + 1:08d}"
            wait_until(first.exists, process)
            time.sleep(chance.uniform(0.0, 0.03))
        finally:
            process.kill()
            process.join(DEADLINE_S)
        assert process.exitcode == -signal.SIGKILL
        newest = check_loadable(tmp_path)
        assert newest > last
        last = newest
        steps.append(newest)
    assert len(steps) == KILLS
    save_step(tmp_path, last + 1)
    assert len(list(tmp_path.iterdir())) == 3, "two checkpoints and the lock; leftovers are gone"


def die_at(call: int) -> None:
    """Make the `call`-th call that changes the disk kill this process instead."""
    counter = iter(range(call + 1))

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return run

    os.mkdir = deadly(os.mkdir)
    os.rename = deadly(os.rename)
    os.fsync = deadly(os.fsync)
    os.unlink = deadly(os.unlink)
    os.rmdir = deadly(os.rmdir)
    writer.save_file = deadly(writer.save_file)
    writer.hash_file = deadly(writer.hash_file)


def save_and_die(folder: Path, step: int, call: int) -> None:
    die_at(call)
    save_step(folder, step)


def test_no_call_exists_at_which_dying_loses_the_last_checkpoint(
    tmp_path: Path, context: ForkServerContext
) -> None:
    killed_before, killed_after = 0, 0
    for step in (1, 2):
        save_step(tmp_path / "before", step)
    for call in range(200):
        folder = tmp_path / str(call)
        shutil.copytree(tmp_path / "before", folder)
        process = context.Process(target=save_and_die, args=(folder, 3, call))
        process.start()
        process.join(DEADLINE_S)
        newest = check_loadable(folder)
        if process.exitcode == 0:
            assert newest == 3
            break
        assert process.exitcode == -signal.SIGKILL
        killed_before += newest == 2
        killed_after += newest == 3
    else:
        pytest.fail("one save makes more calls than expected")
    assert killed_before >= 12, "mkdir, three shards, text, manifest and renames each count"
    assert killed_after >= 3, "removing the oldest is part of it"
