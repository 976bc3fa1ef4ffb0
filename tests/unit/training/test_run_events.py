"""What a run tells beside its steps: the table of peers for views, and samples at its end."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.generation.generating import Generated, Wish, generate
from atomtrain.errors import PlanError
from atomtrain.events import SWARM_FILE
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.membership.records import PeerStatus
from atomtrain.training.run_events import SwarmFile, tell_expelled, tell_rounds, tell_samples

VOCABULARY = 50


class Anything(nn.Module):
    """Thinks every token as likely as any other."""

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCABULARY))


def samples(name: str, seed: int = 0, *, small: bool = False) -> list[str]:
    told: list[str] = []

    def written(prompts: list[list[int]], *, on_host: bool = False, **wish: Any) -> Generated:
        if small and not on_host:
            raise PlanError("too small")
        with closing(open_device("cpu")) as device:
            return generate(Anything(), device, prompts, Wish(**wish))

    sizes, tokenizer = SimpleNamespace(context=8), SimpleNamespace(
        separator=VOCABULARY, encode=lambda _: [1], decode=lambda ids: " ".join(map(str, ids))
    )  # fmt: skip
    session: Any = SimpleNamespace(
        engine=SimpleNamespace(generate=written), name=name, step=4,
        recipe=SimpleNamespace(seed=seed, sizes=sizes), options=SimpleNamespace(prompt="a"),
        text=SimpleNamespace(tokenizer=tokenizer),
    )  # fmt: skip
    events: Any = SimpleNamespace(
        emit=lambda kind, **fields: told.append(fields["text" if kind == "sample" else "message"])
    )
    tell_samples(session, events)
    return told


def test_peers_with_one_model_tell_different_things() -> None:
    told = samples("peer-0")
    assert len(told) == len(set(told)) == 3
    assert samples("peer-0") == told
    assert not set(samples("peer-1")) & set(told)
    assert not set(samples("peer-0", seed=1)) & set(told)


def test_where_the_device_is_too_small_the_host_writes_and_that_is_told() -> None:
    warning, *told = samples("peer-0", small=True)
    assert "on the host: too small" in warning
    assert told == samples("peer-0")


def status(name: str) -> PeerStatus:
    return PeerStatus(
        peer_id=f"id-{name}", name=name, is_self=False, state="training", next_round=1, steps=2,
        tokens=3, tokens_per_s=4.0, step_s=0.5, free_bytes_per_s=0.0, behind=0, reachable=True,
        addresses=("/a",), seen_s=6.0,
    )  # fmt: skip


def told_by(tell: Any) -> list[dict[str, Any]]:
    """Return the events that `tell` emits, which is given the log."""
    told: list[dict[str, Any]] = []
    tell(SimpleNamespace(emit=lambda kind, **fields: told.append({"event": kind, **fields})))
    return told


def test_a_round_tells_who_gave_how_much_and_who_was_rejected() -> None:
    meta = {"versions": [3], "digests": ["d"]}
    swarm: Any = SimpleNamespace(
        state_dict=lambda: SimpleNamespace(meta=meta), peers=lambda: [status("a")]
    )
    report = RoundReport(
        round=7, fragment=0, version=3, outcome="partial", contributors=("id-a", "another-one"),
        weights=(100, 50), rejected=("liar: not finite",),
    )  # fmt: skip
    (event,) = told_by(lambda events: tell_rounds(swarm, [report], events))
    assert event["members"] == ["a", "ther-one"]
    assert event["peer_ids"] == ["id-a", "another-one"]
    assert event["weights"] == [100, 50]
    assert event["rejected"] == ["liar: not finite"]


def test_who_is_expelled_is_told_once_with_the_reason() -> None:
    swarm: Any = SimpleNamespace(
        expelled=lambda: {"id-a": "it lied", "a-stranger": "it lied, too"},
        peers=lambda: [status("a")],
    )
    told: set[str] = set()
    events = told_by(lambda log: tell_expelled(swarm, told, log))
    assert [(event["name"], event["reason"]) for event in events] == [
        ("a", "it lied"), ("stranger", "it lied, too"),
    ]  # fmt: skip
    assert told_by(lambda log: tell_expelled(swarm, told, log)) == []


def test_it_is_written_when_it_is_due(tmp_path: Path) -> None:
    now_s = [0.0]
    file = SwarmFile(tmp_path, lambda: now_s[0])
    assert file.update(lambda: [status("a")])
    assert not file.update(lambda: [status("b")])
    now_s[0] = 1.0
    assert file.update(lambda: [status("b")])
    table = json.loads((tmp_path / SWARM_FILE).read_text())
    assert [peer["name"] for peer in table["peers"]] == ["b"]
    assert table["peers"][0]["seen_s"] == 6.0
    assert [path.name for path in tmp_path.iterdir()] == [SWARM_FILE]


def test_writing_takes_a_hundredth_of_the_time_at_most(tmp_path: Path) -> None:
    times_s = iter([0.0, 0.5, 40.0, 49.0, 51.0, 51.0])
    file = SwarmFile(tmp_path, lambda: next(times_s))
    assert file.update(list)  # took half a second
    assert not file.update(list)
    assert not file.update(list)
    assert file.update(list)


def test_a_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    SwarmFile(tmp_path / "gone", lambda: 0.0).update(list)
