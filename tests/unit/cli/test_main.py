"""Commands that are of a package of their own, where that is missing."""

from __future__ import annotations

import importlib.util

import pytest

from atomtrain.cli.completion import all_parsers, names_after
from atomtrain.cli.main import main


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
    assert "pip install -e research -e benchmarks" in line


@pytest.mark.usefixtures("_product_only")
def test_completion_offers_what_is_installed() -> None:
    assert {"bench", "simulate"}.isdisjoint(all_parsers())
    assert "bench" not in names_after(["train"])


def test_completion_knows_the_benchmarks_where_they_are_installed() -> None:
    assert "swap" in names_after(["bench"])["bench"]
    assert {"bench", "bench report", "simulate"} <= set(all_parsers())
