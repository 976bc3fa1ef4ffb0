"""Preferences learnt by two peers that are real processes: one model, one reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atombench import forks
from atombench.churn.peers import ChurnPeer, Crowd
from atomtrain.training.setup.references import REFERENCES_FILE
from tests.integration.training.test_preferences import pairs
from tests.support.hugging_face_models import UNTIED, write_model
from tests.support.train_processes import check_shared_rounds, interrupt, joined, wait

pytest.importorskip("transformers")
# A slow link leaves the processor to the peer that is starting.
OPTIONS = (
    "--model", "model", "--data", "pairs.jsonl", "--objective", "dpo", "--beta", "0.5",
    "--device", "emulated:20MiB/s", "--device-memory", "2MiB", "--context", "32",
    "--sequences", "4", "--no-profile", "--steps", "100000", "--learning-rate", "0.003",
    "--local-steps", "4", "--evaluate-every", "1000", "--checkpoint-every", "1000",
)  # fmt: skip


def together(peer: ChurnPeer) -> int:
    rounds = peer.of("round")
    return sum(r["outcome"] == "averaged" and r["contributors"] == 2 for r in rounds)


def averaged_since(peer: ChurnPeer, time_s: float) -> set[int]:
    """Return the fragments whose anchors have moved since then."""
    return {r["fragment"] for r in peer.of("round") if r["time_s"] > time_s}


@pytest.mark.parametrize("more", [(), ("--lora", "r=2,alpha=4")], ids=["whole", "adapters"])
def test_who_joins_prefers_what_the_others_do(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", UNTIED)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs())))
    with Crowd(tmp_path, "preferred", (*OPTIONS, *more), popen=forks.Popen) as crowd:
        founder = crowd.start()
        wait(crowd, lambda: len(founder.of("step")) > 8)
        learnt_s = founder.of("step")[-1]["time_s"]
        every = {r["fragment"] for r in founder.of("round")}
        wait(crowd, lambda: every <= averaged_since(founder, learnt_s))
        newcomer = joined(crowd, founder.address)
        wait(crowd, lambda: together(founder) >= 3 and together(newcomer) >= 3)
        wait(crowd, lambda: check_shared_rounds(founder, newcomer) > 0)
        interrupt(crowd, founder, newcomer)

    first, other = (peer.of("step")[0] for peer in (founder, newcomer))
    assert first["reward_margin"] == 0.0
    assert other["reward_margin"] > 0.0, "it starts from what the founder had learnt"
    said = [(peer.folder / REFERENCES_FILE).read_bytes() for peer in (founder, newcomer)]
    assert said[0] == said[1], "and compares with the model as it was before the run"
    for peer in (founder, newcomer):
        assert peer.of("step")[-1]["reward_margin"] > 0.0
    check_shared_rounds(founder, newcomer)
