"""A run's precision: what the device computes fast, kept by who resumes, free for who joins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain.checkpoint import load_latest
from atomtrain.cli.main import main
from atomtrain.engine.devices import native
from atomtrain.events import EVENTS_FILE, EventLog, read_events
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.preflight import CHECKPOINTS
from atomtrain.training.loop import Loop
from atomtrain.training.setup.setup import Session, open_session
from atomtrain.training.setup.state import recipe_of
from tests.support.train_processes import write_text

COMMON: dict[str, Any] = {
    "host": "127.0.0.1", "device": "emulated", "threads": 1, "no_profile": True, "context": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    processor(monkeypatch, "avx2 avx512f")


def processor(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    """Have this processor's flags, and no GPU."""
    Path("cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(native, "_CPUINFO", Path("cpuinfo").absolute())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def train(*more: str, name: str = "mine") -> Path:
    """Run the command; return the peer's folder."""
    given = [
        f"--{key.replace('_', '-')}" if value is True else f"--{key.replace('_', '-')}={value}"
        for key, value in COMMON.items()
    ]
    given += ["--data", "text.txt", "--plain", "--steps", "2", "--run", name]
    assert main(["train", *given, *more]) == 0
    return Path("runs", name, "peer-0")


def precisions(folder: Path) -> list[str]:
    """Return what each start of a run has told, oldest first."""
    told = [e for e in read_events(folder / EVENTS_FILE) if e["event"] == "run_started"]
    return [event["precision"] for event in told]


def test_a_processor_without_fast_bfloat16_trains_in_float32(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = train("--model", "tiny")
    assert precisions(folder) == ["fp32"]
    assert "precision fp32" in capsys.readouterr().out
    assert recipe_of(load_latest(folder / CHECKPOINTS))[0].precision == "fp32"


def test_who_resumes_keeps_the_precision_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, "avx2 amx_bf16")
    folder = train("--model", "tiny")
    assert recipe_of(load_latest(folder / CHECKPOINTS))[0].precision == "bf16"
    processor(monkeypatch, "avx2")  # moved to another machine
    train("--resume", "--steps", "3")
    train("--resume", "--steps", "4", "--precision", "auto")
    assert precisions(folder) == ["bf16"] * 3
    assert recipe_of(load_latest(folder / CHECKPOINTS))[0].precision == "bf16"


def averaged(session: Session) -> set[tuple[int, str]]:
    """Return fragment and digest of each round of two in which a peer took part."""
    return {
        (event["fragment"], event["digest"])
        for event in read_events(session.directory / EVENTS_FILE)
        if event["event"] == "round" and event["outcome"] == "averaged"
        and event["contributors"] == 2
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("own", ["fp32", "fp16"])
def test_peers_of_unlike_precision_train_one_run(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "_interruptible", lambda _: nullcontext())  # of the main thread
    shared = {
        **COMMON,
        "data": ("text.txt",),
        "steps": 120,  # they may begin before either has seen that the other one trains
        "local_steps": 2,
        "directory": Path("r"),
    }
    with ExitStack() as closing:

        def opened(**more: Any) -> Session:
            session = open_session(TrainOptions(**{**shared, **more}))
            closing.callback(session.close)
            return session

        founder = opened(model="tiny", run="mixed", precision="bf16")
        assert founder.swarm is not None
        joiner = opened(join=(f"mixed@{founder.swarm.address}",), precision=own, local_steps=None)
        assert joiner.swarm is not None
        assert (founder.recipe.precision, joiner.recipe.precision) == ("bf16", own)
        for session in (founder, joiner):
            assert session.swarm is not None
            assert session.swarm.manifest.payload["recipe"]["precision"] == "bf16"
        there, here = founder.engine.state_dict(), joiner.engine.state_dict()
        assert all(torch.equal(there[name], here[name]) for name in there), "masters came whole"

        def run(session: Session) -> str:
            session.directory.mkdir(parents=True, exist_ok=True)
            return Loop(session, EventLog(session.directory / EVENTS_FILE)).run()

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(run, (founder, joiner))) == ["completed", "completed"]
        assert averaged(founder) & averaged(joiner), "both hold the bits of some mean"
    saved = {
        s.name: recipe_of(load_latest(s.directory / CHECKPOINTS))[0] for s in (founder, joiner)
    }
    assert [recipe.precision for recipe in saved.values()] == ["bf16", own]
