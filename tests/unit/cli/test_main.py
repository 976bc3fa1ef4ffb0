"""Commands that are of a package of their own, where that is missing."""

from __future__ import annotations

import importlib.util
import io
import sys
import threading
from types import SimpleNamespace

import pytest

from atomtrain import progress
from atomtrain.cli import main as command
from atomtrain.cli.completion import all_parsers, known_names
from atomtrain.cli.main import main
from atomtrain.progress import Progress
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def _product_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the packages beside the product."""
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> object:
        return None if name in ("atombench", "atomresearch") else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.usefixtures("_product_only")
@pytest.mark.parametrize("command", ["bench", "simulate"])
def test_a_command_without_its_package_says_how_to_install_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"'atom {command}'" in line
    assert "pip install -e ." in line


@pytest.mark.usefixtures("_product_only")
def test_completion_offers_what_is_installed() -> None:
    assert {"bench", "simulate"}.isdisjoint(all_parsers())
    assert "bench" not in known_names()


def test_completion_knows_the_benchmarks_where_they_are_installed() -> None:
    assert "swap" in known_names()["bench"]
    assert {"bench", "bench report", "simulate"} <= set(all_parsers())


class Terminal(io.StringIO):
    """Standard error as a terminal, or as a file; knows when something long was told."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.told = threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        if "digging" in text:
            self.told.set()
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_takes_long_is_told_in_a_terminal_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal(is_terminal=is_terminal)

    def run(_: list[str]) -> int:
        with Progress("digging"):
            assert shown.told.wait(PATIENCE_S if is_terminal else 0.05) == is_terminal
        return 0

    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(command, "command_module", lambda _: SimpleNamespace(run=run))
    monkeypatch.setattr(sys, "stderr", shown)
    assert main(["plan"]) == 0
    text = shown.getvalue()
    assert text.startswith("\r\x1b[Kdigging: 1 s") if is_terminal else not text
    assert not is_terminal or text.endswith("\r\x1b[K")  # the line is empty again


def test_help_of_a_command_is_that_command_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", "plan"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: atom plan")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["plan", "tiny", "--sequences", "3"], "give --tokens-per-step N"),
        (["plan", "tiny", "--memory", "8GiB"], "give --device-memory"),
        (["train", "--tokens-per-step", "512"], "give --sequences N"),
        (["train", "--gpu-memory", "8GiB"], "give --device-memory"),
    ],
)
def test_what_another_command_calls_it_is_known(
    arguments: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert f"{arguments[-2]} is not an option of atom {arguments[0]}; {advice}" in told
    assert told.count("\n") == 1
