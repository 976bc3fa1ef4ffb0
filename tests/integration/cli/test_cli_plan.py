"""The real command `atom plan`: what it prints, writes and refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atomtrain.cli.main import main
from atomtrain.planning.catalogue import GPUS
from atomtrain.units import format_bytes, format_count
from tests.support.hugging_face_models import LLAMA

TINY = ("tiny", "--gpu", "rtx-3090")
STEP = ("--tokens-per-step", "256")
PNG = b"\x89PNG\r\n\x1a\n"

CROWDING = "atomtrain.engine.calibration.profiling.crowding_warning"

Output = Callable[..., str]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, on a machine that other programs leave alone, as it seems."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CROWDING, lambda _: None)


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    """Return a call that plans, must succeed, and gives standard output."""

    def run(*arguments: str) -> str:
        assert main(["plan", *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


@pytest.fixture(scope="module")
def tiny_json() -> str:
    """What `--json` prints of the plan that several tests read."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(CROWDING, lambda _: None)
        assert main(["plan", *TINY, *STEP, "--json"]) == 0
    assert err.getvalue() == ""
    return out.getvalue()


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Output:
    """Return a call that plans, must fail politely, and gives the one line."""

    def run(*arguments: str) -> str:
        assert main(["plan", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        assert lines[0].startswith("atom: ")
        return lines[0]

    return run


def test_the_table_says_what_a_person_asks(output: Output, tiny_json: str) -> None:
    """Its figures are those of `--json`, as a person writes them."""
    rows = {line[:12].strip(): line[12:] for line in output(*TINY, *STEP).splitlines() if line}
    found = json.loads(tiny_json)
    plan, machine = found["plan"], found["machine"]
    assert rows["model"].startswith(f"{format_count(found['analysis']['parameters'])} parameters")
    assert f" of {format_bytes(machine['host_memory_bytes'])}: " in rows["host"]
    assert rows["device"].startswith(f"{format_bytes(plan['device_peak_bytes'])} peak of ")
    assert rows["step"].startswith(f"{found['tokens_per_step']} tokens: ")
    assert f", {format_count(found['tokens_per_s'])} tokens/s; " in rows["speed"]
    assert rows["bound by"] == plan["bound"]
    assert rows["busy"].startswith(f"compute {found['busy_shares']['compute']:.1%}, load ")
    assert rows["segments"].startswith(f"backward {len(plan['backward_bounds']) - 1} of ")


def test_json_is_one_object_with_plan_machine_analysis_and_advice(tiny_json: str) -> None:
    assert tiny_json.count("\n") == 1
    found = json.loads(tiny_json)
    assert found["model"] == "tiny"
    assert found["gpu"] == "rtx-3090"
    assert found["plan"]["device_peak_bytes"] <= found["machine"]["device_memory_bytes"]
    assert found["tokens_per_s"] == found["tokens_per_step"] / found["plan"]["step_s"]
    assert found["analysis"]["parameters"] > 0
    assert all(item["speed_ratio"] > 1.02 for item in found["advice"])


def test_what_the_user_fixes_is_kept(output: Output) -> None:
    fixed = {
        "--context": "32", "--tokens-per-step": "256", "--micro-batch": "2",
        "--device-memory": "1GiB", "--host-memory": "2GiB",
    }  # fmt: skip
    found = json.loads(output(*TINY, *(word for pair in fixed.items() for word in pair), "--json"))
    assert found["context_tokens"] == 32
    assert found["tokens_per_step"] == 256
    assert found["micro_batch_sequences"] == 2
    assert found["plan"]["micro_batches"] == 4
    assert found["plan"]["device_memory_bytes"] == 1 << 30
    assert found["machine"]["host_memory_bytes"] == 2 << 30


@pytest.mark.parametrize(
    ("card", "precision"), [("h100", "bf16"), ("v100", "fp16"), ("gtx-1080-ti", "fp32")]
)
def test_auto_is_what_the_planned_gpu_computes_fastest(
    output: Output, card: str, precision: str
) -> None:
    text = output("tiny", "--gpu", card, *STEP)
    assert f"({precision} products)" in text.splitlines()[0]
    found, asked = (
        json.loads(output("tiny", "--gpu", card, *STEP, "--json", *more))
        for more in ((), ("--precision", precision))
    )
    assert found["dtype"] == precision
    assert found == asked


def test_auto_is_refused_where_the_optimizer_cannot_be(complaint: Output) -> None:
    text = complaint("tiny", "--gpu", "gtx-1080-ti", *STEP, "--optimizer", "adamw-split")
    assert "precision fp32 has none that can be split" in text


def test_tf32_is_faster_where_the_gpu_has_it(output: Output) -> None:
    exact = ("--precision", "fp32")
    plain = json.loads(output("tiny", "--gpu", "h100", "--json", *STEP, *exact))
    fast = json.loads(output("tiny", "--gpu", "h100", "--json", *STEP, "--tf32"))
    assert fast["peak_flops_per_s"] > plain["peak_flops_per_s"]
    assert fast["plan"]["compute_s"] <= plain["plan"]["compute_s"]


def test_this_machine_is_measured_where_no_gpu_is_named(output: Output) -> None:
    found = json.loads(output("tiny", "--json"))
    assert found["gpu"] is None
    assert found["peak_flops_per_s"] > 0
    assert found["machine"]["load_bytes_per_s"] > 0


def test_models_of_hugging_face_are_measured_here_too(output: Output, tmp_path: Path) -> None:
    """Their layers are exported, and have no copies of all that they know."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    planned = json.loads(output(str(tmp_path / "config.json"), *STEP, "--context", "32", "--json"))
    assert planned["plan"]["step_s"] > 0


def test_picture_and_trace_are_written_whole(output: Output, tmp_path: Path) -> None:
    output(*TINY, *STEP, "--picture", "plan.png", "--trace", "plan.json")
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    assert {"compute", "load", "unload", "update"} <= {event.get("cat") for event in events}
    assert sorted(path.name for path in tmp_path.glob("*plan*")) == ["plan.json", "plan.png"]


def test_a_saved_machine_can_be_changed_and_planned_with(output: Output, tmp_path: Path) -> None:
    before = json.loads(output(*TINY, *STEP, "--save", "mine.json", "--json"))
    file = tmp_path / "mine.json"
    machine: dict[str, Any] = json.loads(file.read_text())
    assert machine == before["machine"]
    # Too little memory to keep everything there, and a link that then decides.
    machine.update(load_bytes_per_s="1MB/s", unload_bytes_per_s="1MB/s", device_memory_bytes="2MiB")
    file.write_text(json.dumps(machine))
    after = json.loads(output(*TINY, "--machine", "mine.json", "--json", "--tokens-per-step", "64"))
    assert after["machine"]["load_bytes_per_s"] == 1e6
    assert after["plan"]["bound"].startswith("link")


def test_unknown_names_are_answered_with_the_nearest(complaint: Output) -> None:
    assert "Did you mean 'gpt3-13b'?" in complaint("gpt3-13", "--gpu", "rtx-3090")
    assert "Did you mean 'rtx-3090'?" in complaint("tiny", "--gpu", "rtx-309")
    assert "Did you mean '--device-memory'?" in complaint(*TINY, "--device-memroy", "1GiB")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--device-memory", "0"), "--device-memory"),
        (("--host-memory", "many"), "--host-memory"),
        (("--context", "0"), "--context"),
        (("--context", "-5"), "--context"),
        (("--context", "65"), "at most 64 tokens"),
        (("--tokens-per-step", "0"), "--tokens-per-step"),
        (("--tokens-per-step", "100"), "give 64 or 128"),
        (("--micro-batch", "0"), "--micro-batch"),
        (("--head-pieces", "0"), "--head-pieces"),
        (("--tokens-per-step", "128", "--micro-batch", "3"), "do not divide"),
        (("--machine", "missing.json"), "missing.json"),
        (("--picture", "."), "--picture"),
        (("--picture", "nowhere/plan.png"), "nowhere"),
        (("--trace", "nowhere/plan.json"), "nowhere"),
        (("--save", "nowhere/mine.json"), "nowhere"),
    ],
)
def test_nonsense_is_refused_in_one_line(
    complaint: Output, tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    assert named in complaint(*TINY, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_machine_file_with_an_unknown_key_is_refused(complaint: Output, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "mine", "load_byte_per_s": 1}))
    assert "Did you mean 'load_bytes_per_s'?" in complaint(*TINY, "--machine", "mine.json")
    file.write_text("{")
    assert "not JSON" in complaint(*TINY, "--machine", "mine.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_refused(complaint: Output, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert "may not be written to" in complaint(*TINY, "--picture", "closed/plan.png")


def test_models_that_are_none_are_refused(complaint: Output, tmp_path: Path) -> None:
    assert "cannot be read" in complaint("models/config.json", "--gpu", "h100")
    file = tmp_path / "config.json"
    file.write_text("[1]")
    assert "not a JSON object" in complaint("config.json", "--gpu", "h100")
    file.write_text("{}")
    assert "no model_type" in complaint("config.json", "--gpu", "h100")
    file.write_text(json.dumps({"model_type": "lama"}))
    assert "Did you mean 'llama'?" in complaint("config.json", "--gpu", "h100")
    file.write_text("nonsense")
    assert "not JSON" in complaint("config.json", "--gpu", "h100")


def test_what_does_not_fit_says_what_would(complaint: Output) -> None:
    text = complaint("gpt3-6.7b", "--gpu", "rtx-4060-laptop", "--host-memory", "1TiB",
                     "--device-memory", "256MiB")  # fmt: skip
    assert "--device-memory" in text
    assert any(name in text for name in GPUS)
    text = complaint("gpt3-6.7b", "--gpu", "rtx-3090", "--host-memory", "16GiB")
    assert "--host-memory" in text


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--help"])
    assert stop.value.code == 0
    assert "atom plan gpt3-175b" in capsys.readouterr().out
