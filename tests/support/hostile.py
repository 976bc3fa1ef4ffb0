"""Folders, runs and checkpoints that want code to run, and a stub that would tell if any did.

The stub is a package `kernels` of the version that transformers takes. Whatever it is asked for
beyond decorating leaves a line in a file; so do the Python files and pickles of hostile folders.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[2] / "src"
_STUB = """
import os

def use_kernel_forward_from_hub(*_):
    return lambda made: made

use_kernelized_func = use_kernel_forward_from_hub

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def asked(*arguments, **_):
        with open(os.environ["HOSTILE_MARK"], "a") as stream:
            stream.write(f"{name} {arguments}\\n")
        raise RuntimeError(f"{name} was asked for")
    return asked
"""
CODE = """
import os
with open(os.environ["HOSTILE_MARK"], "a") as stream:
    stream.write("python file\\n")
from transformers import LlamaForCausalLM as Evil, LlamaTokenizerFast as EvilTokenizer
"""
EVIL = "evil-org/evil-kernel"


def _version() -> str:
    from transformers.utils import import_utils

    return str(getattr(import_utils, "KERNELS_MIN_VERSION", "0.9.0"))


def write_stub(folder: Path) -> dict[str, str]:
    """Write the stub; return an environment in which it is found, and the mark's name."""
    package = folder / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_STUB)
    info = folder / f"kernels-{_version()}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {_version()}\n")
    path = os.pathsep.join([str(folder), str(SOURCES), str(Path(__file__).parents[1] / "unit")])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "HOSTILE_MARK": str(folder / "mark"),
        "OMP_NUM_THREADS": "1",
    }


def mark(environment: dict[str, str]) -> str:
    """Return what was asked for or run, nothing if nothing was."""
    file = Path(environment["HOSTILE_MARK"])
    return file.read_text() if file.exists() else ""


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> Any:
        code = "open(__import__('os').environ['HOSTILE_MARK'], 'a').write('pickle\\n')"
        return exec, (code,)


def pickled() -> bytes:
    """Return a pickle that leaves a mark."""
    return pickle.dumps(Bomb())
