"""Benchmark `families` by its command, with two of the families of `--quick`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atombench.families import families
from atomtrain.cli.main import main


def test_the_command_compares_real_families(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(families, "QUICK", families.QUICK[:2])
    out = tmp_path / "families.json"
    assert main(["bench", "families", "--quick", "--json", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert (result["families"], result["equal"], result["wrong"]) == (2, 2, [])
    bloom, gpt2 = result["rows"]
    assert bloom["evaluation"] == gpt2["evaluation"] == "equal"
    assert bloom["packing"] == "refused"
    assert "takes no position_ids" in bloom["packing_reason"]
    assert gpt2["packing"] == "accepted"
    assert 0 < gpt2["packing_seen"] < 1e-5
    assert 0 < gpt2["budget_share"] <= 1
