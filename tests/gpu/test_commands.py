"""The commands on a real GPU: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain.events import EventTail
from tests.support import ROOT
from tests.support.held_train import held_founder
from tests.support.hugging_face_models import UNTIED, write_model, write_text
from tests.support.train_processes import events_of, losses_of
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MEMORY = "300MiB"
MODEL: dict[str, Any] = {
    **UNTIED, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
}  # fmt: skip
MINE = "runs/mine/peer-0"


@pytest.fixture(autouse=True)
def _packages() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("blake3", reason="checkpoints need it")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", MODEL)
    write_text(tmp_path / "text.txt")
    return tmp_path


def atom(
    folder: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command as a user does."""
    return subprocess.Popen(
        [sys.executable, "-m", "atomtrain.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    """Return what a command wrote, which must have succeeded."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, out + err
    assert "Traceback" not in err
    return out


def train(
    folder: Path, *more: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    return atom(
        folder, "train", "--model", "model", "--data", "text.txt", "--run", "mine",
        "--host", "127.0.0.1", "--device", "cuda", "--device-memory", MEMORY, "--context", "64",
        "--sequences", "8", "--learning-rate", "0.003", "--plain", *more, environment=environment,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["", "r=4,targets=all-linear", "r=4,targets=all-linear,bits=4"])
def test_a_run_learns_goes_on_and_is_exported(folder: Path, method: str) -> None:
    lora = ("--lora", method) if method else ()
    said(train(folder, "--steps", "10", "--checkpoint-every", "5", *lora))
    said(train(folder, "--steps", "20", "--resume"))
    losses = dict(losses_of(folder / MINE))
    assert sorted(losses) == list(range(1, 21))
    assert losses[20] < 0.9 * losses[1]
    said(atom(folder, "export", MINE, "exported", *(["--merge"] if method else [])))
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(folder / "exported", dtype=torch.float32).cuda()
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(8, device="cuda")[None]).logits).all()
    text = said(
        atom(
            folder, "generate", MINE, "--prompt", "the cat", "--temperature", "0",
            "--tokens", "8", "--device", "cuda",
        )
    )  # fmt: skip
    assert text.startswith("the cat ")


def test_two_peers_average_on_one_gpu(folder: Path) -> None:
    pytest.importorskip("hivemind", reason="training with others needs it")
    both = folder / "both are there"
    environment = held_founder("step", 3, both)  # until the other one is there
    environment["PYTHONPATH"] += os.pathsep + str(ROOT / "src")
    peers = train(
        folder, "--steps", "60", "--peers", "2", "--local-steps", "5", environment=environment
    )
    tail = EventTail(folder / "runs/mine/peer-1/events.jsonl")
    wait_until(
        lambda: (
            peers.poll() is not None
            or any(event["event"] == "run_started" for event in tail.read())
        )
    )
    both.touch()
    said(peers)
    for name in ("peer-0", "peer-1"):
        there = folder / "runs/mine" / name
        assert events_of(there, "run_finished")[-1]["reason"] == "completed"
        rounds = events_of(there, "round")
        assert any(r["outcome"] == "averaged" and r["contributors"] == 2 for r in rounds)
        assert losses_of(there)[-1][1] < losses_of(there)[0][1]


def test_a_plan_is_made_of_what_this_gpu_was_measured_to_do(folder: Path) -> None:
    told = json.loads(said(atom(folder, "plan", "model", "--device-memory", MEMORY, "--json")))
    assert told["plan"]["step_s"] > 0
    assert torch.cuda.get_device_name() in json.dumps(told)
