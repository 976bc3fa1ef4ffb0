"""Which package may import which; the picture in the architecture notes, enforced."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE_S

import atomtrain

ROOT = Path(atomtrain.__file__).parent
BASE = {"errors", "units", "events", "files", "lazy", "pages"}
# What each package may import of the others, beside the base and itself.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "events": set(),
    "files": set(),
    "lazy": set(),
    "pages": set(),
    "analysis": set(),
    "optimizers": set(),
    "planning": {"analysis"},
    "swapping": {"analysis", "planning"},
    "models": {"analysis"},
    "reporting": {"analysis", "planning", "swapping", "models", "optimizers"},
    "swarm": set(),
    "data": set(),
    "checkpoint": set(),
    "metrics": set(),
    "dashboard": {"training", "swarm"},
    "simulation": {"planning", "swarm", "analysis"},
}
ENGINE = ("analysis", "optimizers", "planning", "swapping")


def modules(package: str) -> list[Path]:
    folder = ROOT / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{package}.py"]


def imports(path: Path) -> Iterator[str]:
    """Yield the full names of all imported modules, wherever in the file."""
    package = ["atomtrain", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield source
            if source == "atomtrain":
                yield from (f"atomtrain.{alias.name}" for alias in node.names)


def packages_of(path: Path) -> set[str]:
    """Return the top-level packages of atomtrain that a file imports."""
    parts = [name.split(".") for name in imports(path) if name.startswith("atomtrain.")]
    return {part[1] for part in parts}


def outside_of(path: Path) -> set[str]:
    """Return the distributions from outside that a file imports."""
    tops = {name.partition(".")[0] for name in imports(path)}
    return {top for top in tops if top != "atomtrain" and top not in sys.stdlib_module_names}


def test_the_engine_has_no_circle_of_imports() -> None:
    """Those within functions and for types alone count too."""
    names = {
        f"atomtrain.swapping.{path.stem}": path
        for path in modules("swapping")
        if path.stem != "__init__"
    }
    below = {
        name: {each for each in imports(path) if each in names} for name, path in names.items()
    }
    while free := [name for name, others in below.items() if not others & below.keys()]:
        for name in free:
            del below[name]
    assert not below, "each of these imports another one of them"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_those_below_them(package: str) -> None:
    allowed = MAY_IMPORT[package] | BASE | {package}
    files = modules(package)
    assert files
    for path in files:
        wrong = packages_of(path) - allowed
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("package", ENGINE)
def test_the_engine_needs_torch_and_numpy_only(package: str) -> None:
    for path in modules(package):
        wrong = outside_of(path) - {"torch", "numpy"}
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("package", sorted(BASE))
def test_the_base_needs_nothing(package: str) -> None:
    assert not outside_of(ROOT / f"{package}.py")


def test_nothing_is_read_with_pickle() -> None:
    for path in ROOT.rglob("*.py"):
        names = set(imports(path))
        assert not names & {"pickle", "cPickle", "dill", "cloudpickle", "shelve"}, path
        text = path.read_text(encoding="utf-8")
        assert "torch.load(" not in text, path


def test_importing_the_package_is_cheap_and_leaves_torch_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import atomtrain;"
        "print(len(set(sys.modules) - before),"
        " sorted({'torch', 'numpy', 'hivemind'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    count, loaded = done.stdout.split(" ", 1)
    assert loaded.strip() == "[]"
    assert int(count) < 100, "as many modules as take a few milliseconds"


def test_lazy_names_are_there_and_unknown_ones_are_named() -> None:
    for name in atomtrain.__all__:
        assert getattr(atomtrain, name) is not None
    with pytest.raises(AttributeError, match="'atomtrain' has no attribute 'swop'"):
        atomtrain.swop  # noqa: B018


@pytest.mark.parametrize("package", ["atomtrain", "atomtrain.data", "atomtrain.models"])
def test_lazy_names_are_not_those_of_modules(package: str) -> None:
    """Importing a module would put it in the place of the name."""
    names = set(importlib.import_module(package).__all__)
    folder = ROOT.joinpath(*package.split(".")[1:])
    assert not names & {path.stem for path in folder.iterdir()}
