"""Benchmark `families`: small configurations, rows, what they say together, and their page."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atombench.common import BenchmarkOptions
from atombench.families import case, families
from atombench.families.small import VOCABULARY, shrunk, small_config
from atombench.pages import family_tables
from atomtrain.errors import AnalysisError, ConfigError, DeviceMemoryError

EQUAL = {"result": "equal", "evaluation": "equal", "packing": "accepted", "packing_seen": 1e-7}
ROWS: list[dict[str, Any]] = [
    {"family": "a", **EQUAL},
    {"family": "b", **EQUAL, "packing": "refused", "packing_reason": "b mixes them"},
    {"family": "c", "result": "refused", "reason": "uses <x | y>", "packing": "refused"},
    {"family": "d", **EQUAL, "evaluation": "differs"},
    {"family": "e", **EQUAL, "packing": "leaks", "packing_seen": 0.1},
    {"family": "f", "result": "differs", "reason": "w", "evaluation": "equal"},
    {"family": "g", "result": "failed", "reason": "KeyError: 1"},
    {"family": "h", "result": "not built", "reason": "ImportError: timm"},
]


def test_a_summary_counts_what_can_be_built_and_names_what_is_wrong() -> None:
    found = families.summary(ROWS)
    assert found["families"] == 8
    assert (found["equal"], found["refused"], found["not_built"]) == (4, 1, 1)
    assert found["bit_equal_share"] == 4 / 7
    assert found["wrong"] == ["d", "e", "f", "g"]
    assert (found["packing_accepted"], found["packing_refused"]) == (2, 2)
    assert found["packing_leaks"] == 1
    assert families.summary([])["bit_equal_share"] == 0.0


def test_a_row_in_words() -> None:
    assert families.sentence(ROWS[0]) == "a equal, packing accepted"
    assert families.sentence(ROWS[2]) == "c refused (uses <x | y>), packing refused"
    assert families.sentence(ROWS[3]) == "d equal, evaluation: differs, packing accepted"


def test_the_page_has_a_row_for_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {**families.summary(ROWS), "rows": ROWS, "versions": {"transformers": "5"}}
    monkeypatch.setattr(family_tables, "result", lambda name: made)
    page = family_tables.page()
    assert [line for line in page.splitlines() if line.startswith(("| `", "| **"))] == [
        "| `a` | equal | equal | accepted |",
        "| `b` | equal | equal | refused |",
        r"| `c` | refused: uses &lt;x \| y> | - | refused |",
        "| **`d`** | equal | differs | accepted |",
        "| **`e`** | equal | equal | leaks |",
        "| **`f`** | differs: w | equal | - |",
        "| **`g`** | failed: KeyError: 1 | - | - |",
        "| `h` | ImportError: timm |",
    ]
    assert "Of 8 families" in page
    assert (
        "7 were built small: 4 are equal bit for bit, 1 refused (`c`), wrong or failed: `d`" in page
    )


def test_the_committed_result_has_no_other_bits_and_no_leaks() -> None:
    found = family_tables.result("families")
    assert found["wrong"] == []
    assert found["differs"] == 0
    assert found["bit_equal_share"] > 0.9
    assert found == {**found, **families.summary(found["rows"])}
    assert all(row.get("reason") for row in found["rows"] if row["result"] != "equal")


def test_sizes_become_small_and_of_layers_one_of_each_kind_stays() -> None:
    values = {
        "vocab_size": 50000, "hidden_size": 4096, "num_attention_heads": 32, "head_dim": None,
        "eos_token_id": 40000, "num_hidden_layers": 40, "rope_theta": 10000.0, "use_bias": True,
        "layer_types": ["linear", "linear", "full"] * 13 + ["full"], "num_experts_per_tok": 1,
        "vision_config": {"hidden_size": 1152, "depth": 27},
    }  # fmt: skip
    otherwise = {"rope_theta": 1.0, "vision_config": {"depth": 1}}
    assert shrunk(values, otherwise) == {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8,
        "eos_token_id": 2, "num_hidden_layers": 2, "rope_theta": 1.0, "use_bias": True,
        "layer_types": ["linear", "full"], "num_experts_per_tok": 1,
        "vision_config": {"hidden_size": 32, "depth": 1},
    }  # fmt: skip
    assert small_config("llama").hidden_size == 32


def test_families_that_are_not_there_are_told() -> None:
    with pytest.raises(ConfigError, match=r"no family 'lama'.* Did you mean 'llama'\?"):
        small_config("lama")
    with pytest.raises(ConfigError, match=r"no family 'lama' of causal .* Did you mean 'llama'\?"):
        families.run(BenchmarkOptions(model="lama"))
    with pytest.raises(ConfigError, match="--device 'tpu' cannot be compared; give cpu or cuda"):
        families.run(BenchmarkOptions(quick=True, device="tpu"))


class _Tiny(nn.Module):
    """A language model that takes no part in transformers."""

    def __init__(self, leaks: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.leaks = leaks

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        if self.leaks:
            hidden = hidden.cumsum(1)
        return type("Output", (), {"logits": self.head(hidden)})()


def _row_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch, swapped: Any) -> dict[str, Any]:
    monkeypatch.setattr(case, "_model", lambda family: model)
    monkeypatch.setattr(case, "_packed", lambda family, device: {})
    monkeypatch.setattr(case, "_swapped", swapped)
    return case.measure("tiny")


def test_a_case_says_what_was_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: Any) -> Any:
        raise AnalysisError("no\nline")

    def fails(*_: Any) -> Any:
        raise KeyError(1)

    def outgrows(*_: Any) -> Any:
        raise DeviceMemoryError("more than planned")

    assert _row_of(_Tiny(), monkeypatch, refuses) == {
        "family": "tiny", "result": "refused", "reason": "no line",
    }  # fmt: skip
    assert _row_of(_Tiny(), monkeypatch, fails)["reason"] == "KeyError: 1"
    assert "KeyError" in capsys.readouterr().err
    assert _row_of(_Tiny(), monkeypatch, outgrows)["result"] == "failed"
    broken = _Tiny()
    broken.head.weight.data.fill_(float("nan"))
    assert _row_of(broken, monkeypatch, fails)["result"] == "not built"
    assert _row_of(nn.Linear(2, 2), monkeypatch, fails)["result"] == "not built"


def test_reasons_do_not_tell_where_packages_lie() -> None:
    said = "at /home/me/.venv/lib/python3/site-packages/transformers/models/a.py:3\n(x)"
    assert case.told(said) == "at transformers/models/a.py:3 (x)"


def test_other_bits_are_a_difference_unless_the_model_makes_them_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def differs(*_: Any) -> Any:
        return {"result": "differs"}

    assert _row_of(_Tiny(), monkeypatch, differs)["result"] == "differs"
    model, calls = _Tiny(), itertools.count()
    model.head.register_forward_hook(lambda module, given, made: made * (1 + next(calls) % 7))
    row = _row_of(model, monkeypatch, differs)
    assert (row["result"], row["reason"]) == (
        "not built", "the ordinary loop gives other bits each time",
    )  # fmt: skip


def test_signs_of_zero_and_moments_of_nobody_are_differences() -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    assert case.first_difference({"a": zero}, {"a": -zero}) == "a"
    assert case.first_difference({"a": zero}, {"a": zero, "b:exp_avg": one}) == "b:exp_avg"
    assert case.first_difference({"a": zero, "b": one}, {"a": zero}) == "b"
    assert case.first_difference({"a": zero}, {"a": zero}) is None


def test_shared_weights_that_add_otherwise_are_looked_at_with_one_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swapped(model: Any, steps: Any, reference: Any, device: str) -> Any:
        if max(map(len, steps)) == 1:
            return {"result": at_one}
        return {"result": "differs", "shared": "table"}

    at_one = "equal"
    row = _row_of(_Tiny(), monkeypatch, swapped)
    assert row["result"] == case.ONE
    assert "table, which layers share" in row["reason"]
    at_one = "differs"
    assert _row_of(_Tiny(), monkeypatch, swapped) == {"family": "tiny", "result": "differs"}


def test_what_is_seen_of_another_document() -> None:
    assert case._seen(_Tiny()) < case._LEAK
    assert case._seen(_Tiny(leaks=True)) > 0.01


@pytest.mark.slow
def test_a_process_that_ends_without_a_row_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_CASE", "json.tool")
    row = families._row("/no/such/file", "cpu")
    assert row["result"] == "failed"
    assert re.search("its process ended with [12] and said", row["reason"])


def test_quick_takes_three_families_and_writes_them_as_they_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    out = tmp_path / "families.json"
    kept = []

    def row(name: str, device: str) -> dict[str, Any]:
        assert device == "cpu"
        if out.exists():
            kept.append(len(json.loads(out.read_text())["rows"]))
        return {"family": name, **EQUAL}

    monkeypatch.setattr(families, "_row", row)
    monkeypatch.setattr(families.forks, "run", lambda *_: None)
    monkeypatch.setattr(families, "allowed_cores", lambda: {0})
    result = families.run(BenchmarkOptions(quick=True, out=out))
    assert [row["family"] for row in result["rows"]] == list(families.QUICK)
    assert result["bit_equal_share"] == 1.0
    assert "transformers" in result["versions"]
    assert not json.loads(out.read_text())["complete"], "the command replaces it in the end"
