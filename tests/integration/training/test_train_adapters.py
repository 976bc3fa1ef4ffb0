"""LoRA between peers that are real processes: only adapters travel, and the export has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atombench import forks
from atombench.churn.peers import ChurnPeer, Crowd
from atomtrain.checkpoint import open_checkpoint
from atomtrain.cli.main import main
from tests.support.hugging_face_models import UNTIED, write_model, write_text
from tests.support.train_processes import check_shared_rounds, interrupt, joined, wait

pytest.importorskip("transformers")
_LOCAL_STEPS = 4
_MESSAGES_BYTES = 32768
"""More than the messages of a round, or of a fetch, take beside the parameters."""


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    # Wide enough for the frozen weights to be much more than messages.
    wide = {**UNTIED, "hidden_size": 128, "intermediate_size": 512}
    write_model(tmp_path / "model", wide)
    text = write_text(tmp_path / "text.txt")
    arguments = (
        "--model", str(tmp_path / "model"), "--data", str(text), "--lora", "r=2,alpha=4",
        "--device", "emulated:40MiB/s", "--device-memory", "6MiB", "--context", "16",
        "--sequences", "2", "--no-profile", "--steps", "100000", "--learning-rate", "0.01",
        "--local-steps", str(_LOCAL_STEPS), "--checkpoint-every", "1000",
        "--evaluate-every", "1000",
    )  # fmt: skip
    with Crowd(tmp_path, "adapted", arguments, popen=forks.Popen) as crowd:
        yield crowd


def averaged(peer: ChurnPeer) -> list[dict[str, Any]]:
    rounds = peer.of("round")
    return [r for r in rounds if r["outcome"] == "averaged" and r["contributors"] == 2]


def test_peers_average_and_fetch_adapters_only(crowd: Crowd, tmp_path: Path) -> None:
    founder = crowd.start()
    wait(crowd, lambda: founder.training and len(founder.of("step")) > 2 * _LOCAL_STEPS)
    newcomer = joined(crowd, founder.address)
    wait(crowd, lambda: len(averaged(founder)) >= 3 and len(averaged(newcomer)) >= 3)
    wait(crowd, lambda: check_shared_rounds(founder, newcomer) > 0)
    interrupt(crowd, founder, newcomer)
    checkpoint = open_checkpoint(newcomer.folder)
    elements = checkpoint.meta["swarm"]["fragment_elements"]
    trained = {
        key: tensor.clone()
        for name, shard in checkpoint.shards()
        for key, tensor in shard.items()
        if name != "swarm" and key.endswith("/parameter")
    }
    trained = {key: tensor for key, tensor in trained.items() if "lora_" in key}
    n_trained = sum(tensor.numel() for tensor in trained.values())
    frozen_bytes = (tmp_path / "model" / "model.safetensors").stat().st_size
    # Each tensor begins at a multiple of 256 bytes.
    assert n_trained <= sum(elements) < n_trained + 64 * len(trained)
    assert 3 * (8 * sum(elements) + _MESSAGES_BYTES) < frozen_bytes / 2

    # The newcomer got anchor and momentum of the adapters, in float32, and nothing else; some of
    # them again if they got stale meanwhile.
    fetched_bytes = newcomer.of("run_started")[-1]["fetched_bytes"]
    assert 4 * sum(elements) <= fetched_bytes <= 3 * (8 * sum(elements) + _MESSAGES_BYTES)
    assert founder.of("run_started")[-1]["fetched_bytes"] == 0
    for peer in (founder, newcomer):
        for one in averaged(peer):  # float16 to the owners of slices, and float16 back
            size_bytes = 2 * elements[one["fragment"]]
            assert 0 < one["bytes_sent"] <= size_bytes + _MESSAGES_BYTES
    check_shared_rounds(founder, newcomer)

    # What was averaged is what the export merges.
    assert main(["export", str(newcomer.folder), str(tmp_path / "merged"), "--merge"]) == 0
    from safetensors.torch import load_file

    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (trained[f"{name}.lora_{part}.weight/parameter"] for part in "AB")
    assert b.abs().sum() > 0
    expected = before[f"{name}.weight"] + (b @ a) * 2.0
    torch.testing.assert_close(after[f"{name}.weight"], expected)
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
