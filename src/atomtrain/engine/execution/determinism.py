"""Algorithms that give the same bits in each run, as long as an engine that asks for them is open.

What fast GPU kernels add up in no fixed order differs from run to run in its last bits. PyTorch has
a switch of the whole process that chooses others: for attention the backward of flash and
memory-efficient kernels without atomic additions, and never that of cuDNN. It refuses operations
of which there is no such kind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic  # not loaded by torch itself

from atomtrain.engine.devices.gpus import vendor_here
from atomtrain.errors import ConfigError

_FILLING: Any = torch.utils.deterministic
"""Its flag is a property of the module, which type checkers do not see."""


class _Switch:
    """PyTorch's switch, shared by all open engines: the last one puts it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = (False, False, True)

    def take(self) -> None:
        """Turn it on, unless it is on for others."""
        with self._lock:
            if self._users == 0:
                self._before = (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                    _FILLING.fill_uninitialized_memory,
                )
                torch.use_deterministic_algorithms(True)
                # The engine reads nothing that it has not written; filling would touch all memory.
                _FILLING.fill_uninitialized_memory = False
            self._users += 1

    def give_back(self) -> None:
        """Put it back, unless others still need it."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                enabled, warns, fills = self._before
                torch.use_deterministic_algorithms(enabled, warn_only=warns)
                _FILLING.fill_uninitialized_memory = fills


_SWITCH = _Switch()


@contextmanager
def deterministic() -> Iterator[None]:
    """Choose algorithms that give the same bits in each run; blocks may overlap in any order.

    Raises:
        ConfigError: by the environment a GPU's libraries add in any order.
    """
    if (vendor := vendor_here()) is not None:
        vendor.require_deterministic()
    _SWITCH.take()
    try:
        yield
    finally:
        _SWITCH.give_back()


@contextmanager
def told_plainly() -> Iterator[None]:
    """Say in one line what to do about an operation that has no deterministic kind.

    Raises:
        ConfigError: instead of PyTorch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if "use_deterministic_algorithms(True)" not in str(error):
            raise
        what = str(error).partition(",")[0].partition("\n")[0]
        raise ConfigError(
            f"the model cannot be trained with --deterministic: {what}; leave it out, or replace "
            "the operation"
        ) from error
