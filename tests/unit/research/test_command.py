"""`atom simulate` as its users see it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.cli.main import main
from atomtrain.planning.catalogue import machine_for
from atomtrain.planning.plan.machine import save_machine
from atomtrain.planning.search.batch_search import Analysis, Compute
from atomtrain.views.plans.subject import Place

pytestmark = pytest.mark.slow

SMALL = ("simulate", "tiny", "--peers", "4", "--tokens-per-step", "256")


def test_it_prints_one_object_with_a_row_for_each_link(capsys: pytest.CaptureFixture[str]) -> None:
    links = ("--link", "1Gbit/s", "--link", "1Mbit/s")
    assert main([*SMALL, *links, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    fast, slow = result["rows"]
    assert (fast["link_bits_per_s"], slow["link_bits_per_s"]) == (1e9, 1e6)
    assert fast["atom_tokens_per_s"] == slow["atom_tokens_per_s"] > 0
    assert fast["pipeline_tokens_per_s"] > slow["pipeline_tokens_per_s"]
    assert slow["ratio"] > fast["ratio"]
    assert result["tokens_per_step"] == 256


def test_narrow_values_are_computed_faster(capsys: pytest.CaptureFixture[str]) -> None:
    rates = {}
    for precision in ("fp32", "bf16"):
        wide = ("simulate", "gpt3-small", "--link", "1Gbit/s", "--precision", precision, "--json")
        assert main([*wide]) == 0
        rates[precision] = json.loads(capsys.readouterr().out)["rows"][0]["atom_tokens_per_s"]
    assert rates["bf16"] > 1.2 * rates["fp32"]


def test_the_table_says_that_it_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--link", "100Mbit/s"]) == 0
    text = capsys.readouterr().out
    assert "100 Mbit/s" in text
    assert "Simulated, not measured" in text


def test_a_narrow_way_out_slows_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for upload in ("100Mbit/s", "1Mbit/s"):
        assert main([*SMALL, "--link", "100Mbit/s", "--upload", upload, "--json"]) == 0
        (found[upload],) = json.loads(capsys.readouterr().out)["rows"]
    even, narrow = found.values()
    assert narrow["link_bits_per_s"] == 1e8
    assert narrow["pipeline_tokens_per_s"] < even["pipeline_tokens_per_s"]
    assert narrow["atom"]["averaged_every_s"] > even["atom"]["averaged_every_s"]
    assert main([*SMALL, "--link", "100Mbit/s", "--upload", "1Mbit/s"]) == 0
    assert "at most 1Mbit/s out of each peer" in capsys.readouterr().out


def test_rounds_of_unlike_peers_are_simulated_on_each_link(
    capsys: pytest.CaptureFixture[str],
) -> None:
    many = ("simulate", "tiny", "--peers", "100", "--tokens-per-step", "256", "--rounds", "20")
    links = ("--link", "1Gbit/s", "--link", "1Mbit/s", "--upload", "2Mbit/s", "--group", "8")
    assert main([*many, *links, "--json"]) == 0
    fast, slow = json.loads(capsys.readouterr().out)["fleet"]
    assert fast["round_s"] < slow["round_s"]
    assert 0 < fast["busiest_up_share"] <= 1
    assert fast["members"] > 90
    for row in (fast, slow):
        others = row["pipelines"]
        assert row["ratio"] == row["tokens_per_s"] / others["tokens_per_s"]
        assert 0 < others["share_of_staying"] <= 1
    assert fast["pipelines"]["tokens_per_s"] > slow["pipelines"]["tokens_per_s"]
    assert main([*many, "--link", "100Mbit/s"]) == 0
    assert "20 rounds of 100 unlike peers, groups of 16" in capsys.readouterr().out
    assert main([*many, "--link", "100Mbit/s", "--group", "0"]) == 0
    text = capsys.readouterr().out
    assert "20 rounds of 100 unlike peers, one group of all" in text
    assert "The same peers as pipelines" in text


def test_peers_can_be_machines_that_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--here` measures this one, like `atom plan`; `--machine` takes what that saved."""
    sheet = machine_for("rtx-3090", 64 << 30)
    slow = dataclasses.replace(sheet, name="slow", load_bytes_per_s=1e6)
    save_machine(slow, tmp_path / "slow.json")

    def of_a_second(analysis: Analysis) -> dict[str, LayerTime]:
        return {layer.kind: LayerTime(1.0, 2.0) for layer in analysis.costs.layers}

    local = Compute(of_a_second, 1e9, 1e9)
    measured = Place(dataclasses.replace(sheet, name="here"), local=local)
    monkeypatch.setattr("atomtrain.views.plans.subject.this_place", lambda *_: measured)
    found = []
    for where in (("--here",), ("--machine", str(tmp_path / "slow.json")), ()):
        assert main([*SMALL, "--link", "1Mbit/s", "--json", *where]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [(each["gpu"], each["machine"]) for each in found[:2]] == [
        (None, "here"),
        ("rtx-3090", "slow"),
    ]
    here_s, slow_s, sheet_s = (each["step_s"] for each in found)
    assert sheet_s <= slow_s < 1.0 < here_s
    assert main([*SMALL, "--link", "1Mbit/s", "--here"]) == 0
    assert "figures of this machine as it was measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--spread", "0.5"), "--spread says something only of --rounds N"),
        (("--peers", "1"), "--peers must be at least 2"),
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--rounds", "5", "--group", "1"), "groups must be of at least 2"),
        (("--spread", "9"), "--spread takes 0"),
        (("--round-trip", "-1"), "0 to 10 seconds"),
        (("--link", "fast"), "is not a rate"),
        (("--gpu", "rtx-3091"), "Did you mean 'rtx-3090'"),
        (("--wire", "float15"), "wire format"),
        (("--here", "--gpu", "a100-40gb"), "leave --gpu and --machine out"),
        (("--machine", "/no/such/file"), "cannot read the machine file"),
        (("--precision", "bf61"), "there is no precision 'bf61'"),
    ],
)
def test_mistakes_take_one_line(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
