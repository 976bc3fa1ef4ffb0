"""Which package may import which; the picture in the architecture notes, enforced."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import atomtrain
from tests.support import ROOT
from tests.support.waiting import PATIENCE_S

FOLDERS = {"atomtrain": "src", "atombench": "benchmarks", "atomresearch": "research"}
BASE = {
    f"atomtrain.{name}"
    for name in (
        "errors",
        "units",
        "events",
        "files",
        "lazy",
        "locks",
        "progress",
        "settings",
        "topology",
    )
}
ANALYSIS = ("export", "layers", "costs", "head")
PLANNING = ("plan", "cost", "search")
ENGINE = ("devices", "state", "updates", "execution", "calibration", "generation")
SWARM = ("transport", "codecs", "anchors", "membership", "rounds", "catchup", "node")


def below(package: str, rooms: tuple[str, ...]) -> dict[str, set[str]]:
    """Return for each room of a package those before it, which it may import."""
    names = [f"{package}.{room}" for room in rooms]
    return {name: set(names[:index]) for index, name in enumerate(names)}


def all_of(package: str, rooms: tuple[str, ...] = ()) -> set[str]:
    """Return a package and its rooms."""
    return {package, *(f"{package}.{room}" for room in rooms)}


ANALYSED = all_of("atomtrain.analysis", ANALYSIS)
PLANNED = all_of("atomtrain.planning", PLANNING)
ENGINES = all_of("atomtrain.engine", ENGINE)
SWARMS = all_of("atomtrain.swarm", SWARM)
LIGHT = {
    f"atomtrain.{name}"
    for name in ("optimizers", "models", "models.weights", "data", "checkpoint", "metrics")
}
VIEWS = all_of("atomtrain.views", ("plans", "runs", "dashboard"))
TRAINING = all_of("atomtrain.training", ("config", "setup", "trainer", "tools"))
# What each room may import of the others, beside the base and itself.
MAY_IMPORT: dict[str, set[str]] = {
    **{name: BASE - {name} for name in sorted(BASE)},
    **below("atomtrain.analysis", ANALYSIS),
    "atomtrain.analysis": ANALYSED,
    **{name: rooms | ANALYSED for name, rooms in below("atomtrain.planning", PLANNING).items()},
    "atomtrain.planning": PLANNED | ANALYSED,
    **{
        name: rooms | PLANNED | ANALYSED | {"atomtrain.native"}
        for name, rooms in below("atomtrain.engine", ENGINE).items()
    },
    "atomtrain.engine": ENGINES | PLANNED | ANALYSED,
    "atomtrain.native": set(),
    "atomtrain.optimizers": {"atomtrain.native"},
    "atomtrain.models.weights": set(),
    "atomtrain.models": ANALYSED | {"atomtrain.models.weights", "atomtrain.native"},
    "atomtrain.models.dequantised": {"atomtrain.models.weights", "atomtrain.models"},
    "atomtrain.data": set(),
    "atomtrain.checkpoint": set(),
    "atomtrain.metrics": set(),
    **below("atomtrain.swarm", SWARM),
    "atomtrain.swarm.codecs": {"atomtrain.swarm.transport", "atomtrain.native"},
    "atomtrain.swarm": SWARMS,
    "atomtrain.views": set(),
    "atomtrain.views.plans": ENGINES | PLANNED | ANALYSED | LIGHT,
    "atomtrain.views.runs": {"atomtrain.views.plans"} | ENGINES | PLANNED,
    "atomtrain.views.dashboard": {"atomtrain.views.runs"} | SWARMS,
    "atomtrain.training.config": ENGINES | PLANNED | LIGHT | SWARMS,
    "atomtrain.training.setup": {
        *("atomtrain.training.config", "atomtrain.views.plans"),
        "atomtrain.models.dequantised",
        *(ENGINES | PLANNED | ANALYSED | LIGHT | SWARMS),
    },
    "atomtrain.training.trainer": {
        *("atomtrain.training.config", "atomtrain.training.setup", "atomtrain.views.runs"),
        *(ENGINES | LIGHT),
    },
    "atomtrain.training.tools": {"atomtrain.training.config", "atomtrain.training.setup"}
    | (ENGINES | LIGHT | SWARMS),
    "atomtrain.training": TRAINING | VIEWS | ENGINES | LIGHT | SWARMS,
    "atomtrain": {"atomtrain.engine", "atomtrain.training.trainer"},
    "atomtrain.cli": {"atomtrain"} | TRAINING | VIEWS | ENGINES | PLANNED | LIGHT | SWARMS,
}
PURE = sorted(ANALYSED | PLANNED | ENGINES | {"atomtrain.native", "atomtrain.optimizers"})


def folder_of(room: str) -> Path:
    """Return where a room lies: a folder, or a file of the base."""
    top, _, rest = room.partition(".")
    return ROOT / FOLDERS[top] / Path(top, *filter(None, rest.split(".")))


def modules(room: str) -> list[Path]:
    """Return the files of a room, without those of rooms within it."""
    folder = folder_of(room)
    return sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def name_of(path: Path) -> str:
    """Return the full name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


ROOMS = {
    ".".join(path.parent.relative_to(ROOT).parts[1:])
    for folder in FOLDERS.values()
    for path in (ROOT / folder).glob("*/**/*.py")
}


def room_of(name: str) -> str:
    """Return the room of a module, or of a name that one defines."""
    while name not in ROOMS and name not in BASE:
        name = name.rpartition(".")[0]
    return name


def imports(path: Path) -> Iterator[str]:
    """Yield the full names of all that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_of(path: Path) -> set[str]:
    """Return the rooms that a file imports from, its own left out."""
    names = [name for name in imports(path) if name.split(".")[0] in FOLDERS]
    return {room_of(name) for name in names} - {room_of(name_of(path))}


def outside_of(path: Path) -> set[str]:
    """Return the distributions from outside that a file imports."""
    tops = {name.partition(".")[0] for name in imports(path)}
    return {top for top in tops if top not in FOLDERS and top not in sys.stdlib_module_names}


def test_every_room_has_a_rule() -> None:
    product = {room for room in ROOMS if room.split(".")[0] == "atomtrain"}
    assert product == set(MAY_IMPORT) - BASE


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_those_below_them(room: str) -> None:
    files = modules(room)
    assert files
    for path in files:
        wrong = rooms_of(path) - MAY_IMPORT[room] - BASE
        assert not wrong, f"{name_of(path)} imports {', '.join(sorted(wrong))}"


def test_rules_have_no_circle() -> None:
    rooms = {room: MAY_IMPORT[room] - BASE - {room} for room in MAY_IMPORT if room not in BASE}
    done: set[str] = set()
    while ready := {room for room in rooms if room not in done and rooms[room] <= done}:
        done |= ready
    assert done == set(rooms)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["atomresearch", "atombench"])
def test_what_lies_beside_the_product_is_not_imported_by_it(package: str) -> None:
    above = {"atomresearch": ("atomtrain",), "atombench": ("atomtrain", "atomresearch")}[package]
    for top in above:
        for path in (ROOT / FOLDERS[top] / top).rglob("*.py"):
            used = {name.split(".")[0] for name in imports(path)}
            assert package not in used, f"{name_of(path)} imports {package}"


@pytest.mark.parametrize("room", PURE)
def test_the_engine_needs_torch_and_numpy_only(room: str) -> None:
    for path in modules(room):
        wrong = outside_of(path) - {"torch", "numpy"}
        assert not wrong, f"{name_of(path)} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("name", sorted(BASE))
def test_the_base_needs_nothing(name: str) -> None:
    assert not outside_of(folder_of(name).with_suffix(".py"))


@pytest.mark.slow
def test_nothing_is_read_with_pickle() -> None:
    for path in (ROOT / "src").rglob("*.py"):
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


@pytest.mark.parametrize("package", ["atomtrain", "atomtrain.models"])
def test_lazy_names_are_not_those_of_modules(package: str) -> None:
    """Importing a module would put it in the place of the name."""
    names = set(importlib.import_module(package).__all__)
    folder = folder_of(package)
    assert not names & {path.stem for path in folder.iterdir()}
