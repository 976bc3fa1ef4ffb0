"""What belongs to one maker's GPUs is named in that maker's module only."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atomtrain.engine.devices import gpus
from atomtrain.engine.devices.device_names import GPU_KINDS
from atomtrain.engine.devices.xpu import XPU
from atomtrain.errors import ConfigError
from tests.support import ROOT

PRODUCT = ROOT / "src" / "atomtrain"
DEVICES = PRODUCT / "engine" / "devices"
MAKERS = {DEVICES / "cuda.py", DEVICES / "xpu.py"}
CARDS = PRODUCT / "planning" / "catalogue.py"
"""A table of makers' cards and their sources."""
WORD = re.compile(r"(?<![a-z])(cuda|cublas|hip|rocm|xpu|nvidia)(?![a-z])", re.IGNORECASE)
IN_NAMES = re.compile(r"cuda|cublas|rocm|xpu|nvidia", re.IGNORECASE)

ALLOWED: dict[str, tuple[int, str]] = {
    "engine/devices/device_names.py": (9, "what users type, told apart without torch"),
    "engine/devices/devices.py": (2, "examples in messages"),
    "engine/devices/gpus.py": (6, "the one place where the makers' modules are put together"),
    "training/config/options.py": (1, "the help of --device"),
    "training/config/other_names.py": (
        3,
        "another program's option, and what to give in its place",
    ),
    "cli/machine.py": (2, "the help of --device, and an example"),
    "cli/trained.py": (2, "the help of --device, and an example"),
}
"""How many there are in a file that is not a maker's, and why they may be."""


def words_of(text: str) -> Iterator[str]:
    """Yield each use of a maker's word in code: names, attributes, imports and strings. Docstrings
    and comments may say what they like."""
    tree = ast.parse(text)
    said = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(string)) if id(node) not in said and WORD.search(string):
                yield f"line {node.lineno}: {string!r}"
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) if (
                IN_NAMES.search(name) or name == "hip"
            ):
                yield f"line {node.lineno}: {name}"
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if IN_NAMES.search(name):
                yield f"line {node.lineno}: {name}"
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                module = getattr(node, "module", None) or ""
                for alias in names:
                    if IN_NAMES.search(f"{module}.{alias.name}"):
                        yield f"line {node.lineno}: import {module} {alias.name}"


@pytest.mark.slow
def test_only_makers_modules_name_a_maker() -> None:
    found = {
        str(path.relative_to(PRODUCT)): list(words_of(path.read_text(encoding="utf-8")))
        for path in sorted(PRODUCT.rglob("*.py"))
        if path not in MAKERS | {CARDS}
    }
    for name, words in found.items():
        most = ALLOWED[name][0] if name in ALLOWED else 0
        assert len(words) == most, (
            f"{name}: ask the device, or atomtrain.engine.devices.gpus.vendor_of, instead; "
            f"{most} allowed here: {words}"
        )
    assert set(ALLOWED) <= set(found)


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "torch.xpu.Stream()",
        "torch.backends.cuda.is_built()",
        "torch.version.hip",
        "if device.type == 'cuda': pass",
        "gpu = kind in ('xpu', 'cpu')",
        "device.startswith(f'cuda:{index}')",
        "os.environ['CUBLAS_WORKSPACE_CONFIG']",
        "from torch.cuda import Stream",
        "from atomtrain.engine.devices import xpu",
        "def on_rocm(): ...",
        "class CudaDevice: ...",
    ],
)
def test_a_word_that_somebody_adds_is_found(code: str) -> None:
    assert len(list(words_of(code))) == 1


def test_what_only_looks_like_one_or_is_said_in_a_docstring_is_none() -> None:
    code = '"""Unlike CUDA."""\nmembership = "a relationship"  # on ROCm\nX = 1\n"""As of xpu."""\n'
    assert not list(words_of(code))


def test_names_of_devices_and_makers_modules_agree() -> None:
    assert tuple(vendor.kind for vendor in gpus.VENDORS) == GPU_KINDS


def asked_of(path: Path) -> Iterator[str]:
    """Yield the names that a file takes of a maker's module of PyTorch, as `vendor.api`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if owner in ("api", "_api"):
                yield node.attr


@pytest.mark.parametrize("module", [torch.cuda, torch.xpu], ids=lambda module: module.__name__)
def test_pytorchs_modules_have_what_is_asked_of_all(module: object) -> None:
    paths = set(DEVICES.glob("*.py")) - (MAKERS if module is torch.cuda else {DEVICES / "cuda.py"})
    asked = Counter(name for path in sorted(paths) for name in asked_of(path))
    assert {"Stream", "stream", "device", "mem_get_info", "default_generators"} <= set(asked)
    missing = {name for name in asked if not hasattr(module, name)}
    if missing and module is torch.xpu:  # in an old torch, with which no such device is opened
        with pytest.raises(ConfigError, match="install a newer one"):
            XPU.prepare()
        missing -= {"get_per_process_memory_fraction", "set_per_process_memory_fraction"}
    assert missing == set()


def test_events_of_both_makers_take_and_have_what_is_asked() -> None:
    for kind in (torch.cuda.Event, torch.xpu.Event):
        for name in ("record", "query", "synchronize", "elapsed_time"):
            assert callable(getattr(kind, name))
    for kind in (torch.cuda.Stream, torch.xpu.Stream):
        for name in ("wait_event", "synchronize"):
            assert callable(getattr(kind, name))
