"""The benchmark `offloaders` with tiny inputs: all do the same work, and failures are told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from atombench.common import BenchmarkOptions
from atombench.offloaders import offloaders
from atombench.offloaders.contenders import OffloadCase
from atombench.offloaders.offloaders import Setting
from atomtrain.cli.main import main
from atomtrain.errors import ConfigError

CASE = OffloadCase(
    layers=2, width=512, vocabulary=64, sequence_tokens=16, sequences=2, rounds=1, search_turns=1
)
"""So wide that memory grows by more than what is free of it before."""


def test_the_same_work_by_all_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        offloaders,
        "SETTINGS",
        {
            "atom": [Setting(2, {})],
            "atom-bf16-int8": [Setting(2, {})],
            "absent": [Setting(1, {})],
            "fsdp2": [Setting(1, {"no_such_setting": True}), Setting(2, {})],
            "resident": [Setting(2, {})],
        },
    )
    monkeypatch.setattr(offloaders, "NEEDED", {"absent": "install it"})
    result = offloaders.run(BenchmarkOptions(device="cpu"), CASE)
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["absent"]["failure"] == "absent is not installed; install it"
    assert rows["atom"]["loss_difference"] == 0.0
    assert rows["fsdp2"]["loss_difference"] < 1e-5
    assert 0 < rows["atom-bf16-int8"]["loss_difference"] < 0.01
    assert "no_such_setting" in rows["fsdp2"]["tried"][0]["failure"]
    for name in ("atom", "atom-bf16-int8", "fsdp2", "resident"):
        assert rows[name]["step_s"] > 0
        assert rows[name]["host_peak_bytes"] > 0
        assert rows[name]["device_peak_bytes"] == 0
        assert rows[name]["micro_batches"] == 2


@pytest.mark.parametrize("arguments", [("--device", "emulated"), ("--device", "tpu")])
def test_devices_that_not_all_run_on_are_refused(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offloaders", *arguments]) != 0
    assert "is not cpu or cuda" in capsys.readouterr().err


def test_other_benchmarks_take_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "depth", "--device", "cpu"]) != 0
    assert "takes no --device" in capsys.readouterr().err


def test_a_case_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="rounds must be at least 1"):
        OffloadCase(rounds=0)
