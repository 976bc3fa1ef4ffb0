"""Embeddings by the real commands, on a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain.cli.main import main
from atomtrain.events import read_events
from atomtrain.training.setup.state import open_trained
from tests.support.hugging_face_models import UNTIED, saved_tensors, write_model

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")
WORDS = ("cat", "mat", "dog", "door", "rain", "roof", "sat", "lay")
OPTIONS = [
    "--host", "127.0.0.1", "--device", "emulated:4GiB/s", "--device-memory", "1MiB",
    "--context", "16", "--sequences", "16", "--micro-batch", "16", "--plain", "--no-profile",
    "--threads", "1", "--evaluate-every", "100", "--checkpoint-every", "10", "--seed", "1",
    "--precision", "fp32", "--learning-rate", "0.003",
]  # fmt: skip


def matches(count: int = 160) -> list[dict[str, Any]]:
    return [
        {
            "query": f"the {WORDS[n % 8]} {'and ' * (n % 3)}",
            "positive": f"on {WORDS[n % 8 - 1]} the",
        }
        for n in range(count)
    ]


def write_rows(file: str, rows: list[dict[str, Any]]) -> None:
    Path(file).write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", UNTIED)
    write_rows("rows.jsonl", matches())


def train(*more: str) -> list[dict[str, Any]]:
    given = ["--model", "model", "--data", "rows.jsonl", "--objective", "embed"]
    given = [] if "--resume" in more else given
    assert main(["train", "--run", "mine", *given, *OPTIONS, *more]) == 0
    return list(read_events(Path("runs/mine/peer-0/events.jsonl")))


@pytest.mark.parametrize(
    "more", [("--learning-rate", "0.001"), ("--lora", "r=8,alpha=16")], ids=["whole", "adapters"]
)
def test_queries_find_their_texts_and_the_export_is_a_model_without_a_head(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModel

    events = train("--steps", "30", *more)
    adapted = "--lora" in more
    evaluations = [event for event in events if event["event"] == "evaluation"]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert evaluations[-1]["accuracy"] > evaluations[0]["accuracy"]
    assert not [event for event in events if event["event"] == "sample"], "it continues no text"
    capsys.readouterr()
    assert main(["evaluate", "runs/mine/peer-0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] >= 0.8
    assert found["among"] == 8
    assert main(["evaluate", "runs/mine/peer-0"]) == 0
    assert "of 8 queries, among 8 texts" in capsys.readouterr().out
    assert main(["generate", "runs/mine/peer-0"]) == 2
    assert "continues none" in capsys.readouterr().err
    assert main(["export", "runs/mine/peer-0", "a.gguf", "--gguf", "f16"]) == 2
    assert "has no head" in capsys.readouterr().err

    assert main(["export", "runs/mine/peer-0", "exported", *(["--merge"] if adapted else [])]) == 0
    load: Any = AutoModel.from_pretrained
    ids = torch.arange(1, 25).view(2, 12)
    with torch.no_grad():
        own = open_trained(Path("runs/mine/peer-0")).model(ids).last_hidden_state
        exported = load("exported").eval()
        assert type(exported).__name__ == "LlamaModel"
        assert torch.equal(exported(ids).last_hidden_state, own)
    if adapted:
        peft = pytest.importorskip("peft")
        assert main(["export", "runs/mine/peer-0", "adapters"]) == 0
        with torch.no_grad():
            model = peft.PeftModel.from_pretrained(load("model"), "adapters").eval()
            torch.testing.assert_close(model(ids).last_hidden_state, own)
    capsys.readouterr()
    assert main(["evaluate", "exported", "--data", "rows.jsonl", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["loss"] == pytest.approx(found["loss"], abs=1e-5)
    given = ["--model", "exported", "--data", "rows.jsonl", "--objective", "dpo"]
    assert main(["train", *given, "--steps", "1"]) == 2
    assert "has no head" in capsys.readouterr().err


def test_a_resumed_run_goes_on_with_the_same_bits() -> None:
    train("--steps", "20")
    folder = Path("runs/mine/peer-0")
    expected = saved_tensors(folder)
    shutil.rmtree(max((folder / "checkpoints").glob("step-*")))
    train("--resume")
    found = saved_tensors(folder)
    assert set(expected) == set(found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("more", "rows", "expected"),
    [
        (["--packing"], None, "--objective embed every text has its own"),
        (["--micro-batch", "2"], None, "no other text to tell it from"),
        (["--micro-batch", "1"], None, "every pair takes two sequences"),
        ([], [{"query": "a"}], "bad.jsonl:1: has 'query'; embeddings are learnt from rows with"),
        ([], [{"query": "a", "positive": 1}], "bad.jsonl:1: 'positive' must be a text"),
        ([], [{"query": "a", "positive": " "}] * 2, "none of the 2 rows of bad.jsonl has a query"),
        (
            [],
            [{"anchor": "a", "positive": "b", "negative": "c"}],
            "bad.jsonl:1: has 'negative', which is not read",
        ),
    ],
)
def test_mistakes_are_one_line(
    more: list[str],
    rows: list[dict[str, Any]] | None,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if rows is not None:
        write_rows("bad.jsonl", rows)
    data = "rows.jsonl" if rows is None else "bad.jsonl"
    given = ["--model", "model", "--data", data, "--objective", "embed", *OPTIONS]
    assert main(["train", "--run", "mine", *given, *more]) == 2
    told = capsys.readouterr().err
    assert expected in told
    assert told.count("\n") == 1
    assert not Path("runs/mine/peer-0").exists()
