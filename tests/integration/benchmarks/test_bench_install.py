"""The benchmark of what installing brings along counts what pip would install."""

from __future__ import annotations

import json

import pytest

from atombench import install
from atomtrain.cli.main import main
from atomtrain.errors import ConfigError
from atomtrain.swarm.packages import PACKAGES


def test_without_the_swarm_none_of_its_packages_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "install", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    plain, sizes = set(result["plain_names"]), result["size_bytes"]
    assert {"atomtrain", "numpy", "tokenizers", "pillow"} <= plain, "what those need counts, too"
    assert not {*PACKAGES, "torch", "sympy"} & plain
    assert set(PACKAGES) <= set(result["swarm_only_names"])
    assert set(sizes) == plain | set(result["swarm_only_names"])
    assert not {"torch", "transformers", "pytest"} & set(sizes)
    assert (result["plain_packages"], result["swarm_packages"]) == (len(plain), len(sizes))
    assert result["plain_bytes"] == sum(sizes[name] for name in plain)
    assert result["swarm_bytes"] == sum(sizes.values())
    assert sizes["numpy"] > 10_000_000
    assert sizes["atomtrain"] > 1_000_000
    assert result["import_s"] > 0


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> install.Distribution:
        if name == "hivemind":
            raise install.PackageNotFoundError(name)
        return install.Distribution.from_name(name)

    monkeypatch.setattr(install, "distribution", without)
    assert "numpy" in install.needed()
    with pytest.raises(ConfigError, match="hivemind is not installed"):
        install.needed("swarm")
