"""Preferences learnt by two peers that are real processes: one model, one reference."""

from __future__ import annotations

import json
from pathlib import Path

import forks
import pytest
from hugging_face_models import UNTIED, write_model
from test_preferences import pairs

from atomtrain.benchmarks.churn_check import compare_checkpoints
from atomtrain.benchmarks.churn_peers import ChurnPeer, Crowd
from atomtrain.training.references import REFERENCES_FILE

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

        def wait(condition: object) -> None:
            assert callable(condition)
            assert crowd.wait(condition, 120.0), [peer.last_words() for peer in crowd.peers]
            assert all(peer.running for peer in crowd.peers)

        founder = crowd.start()
        wait(lambda: len(founder.of("step")) > 8)
        learnt_s = founder.of("step")[-1]["time_s"]
        every = {r["fragment"] for r in founder.of("round")}
        wait(lambda: every <= averaged_since(founder, learnt_s))
        newcomer = crowd.start(founder.address)
        wait(lambda: together(founder) >= 3 and together(newcomer) >= 3)
        assert crowd.interrupt(120) == [founder, newcomer]

    first, other = (peer.of("step")[0] for peer in (founder, newcomer))
    assert first["reward_margin"] == 0.0
    assert other["reward_margin"] > 0.0, "it starts from what the founder had learnt"
    said = [(peer.folder / REFERENCES_FILE).read_bytes() for peer in (founder, newcomer)]
    assert said[0] == said[1], "and compares with the model as it was before the run"
    for peer in (founder, newcomer):
        assert peer.of("step")[-1]["reward_margin"] > 0.0
    assert compare_checkpoints(p.folder / "checkpoints" for p in crowd.peers).unequal == 0
