"""What a maker of GPUs offers, through the module that PyTorch has for its devices.

`torch.cuda` and `torch.xpu` share the names of streams, memory counters and random numbers. These
are used as they are, through `Vendor.api`. What differs is a method, or a constant, which each
maker's module fills in (`cuda.py`, `xpu.py`); no other module names a maker.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from atomtrain.errors import ConfigError, reason_of


def built_without(what: str) -> str:
    """Return what to do about a torch that reaches no GPU of a kind."""
    return (
        f"torch {torch.__version__} is built without {what}; install one built for it "
        "(https://pytorch.org/get-started/locally)"
    )


class Card(NamedTuple):
    """A GPU."""

    name: str
    total_bytes: int
    cache_bytes: int
    """Of the largest cache."""


class Memory(NamedTuple):
    """A GPU's memory now."""

    name: str
    """The GPU's."""
    free_bytes: int
    """What nobody uses."""
    total_bytes: int


class Registrar(Protocol):
    """Pins memory that is there already."""

    def register(self, address: int, n_bytes: int) -> int:
        """Pin whole pages; return 0, or the driver's error, which is forgotten."""
        ...

    def unregister(self, address: int) -> None:
        """Unpin what was pinned from this address on."""
        ...


class Vendor(ABC):
    """A maker's GPUs. Where a method takes one, it takes its number or its device."""

    kind: str
    """What torch and `--device` call its GPUs."""
    title: str
    """What messages call them."""
    api: Any
    """PyTorch's module for them."""
    mask: str
    """The environment variable that says which of them a process sees."""
    registers: bool
    """Whether it has a `registrar`."""

    # Which there are ------------------------------------------------------------------------

    def count(self) -> int:
        """Return the number of GPUs that can be used."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `why_none` says it in one line
            return int(self.api.device_count()) if self.api.is_available() else 0

    @abstractmethod
    def driver_is_there(self) -> bool:
        """Return whether this machine has a GPU's driver, whether torch can use it or not."""

    @abstractmethod
    def why_none(self) -> str:
        """Return why no GPU can be used, and what to do, as a part of a sentence."""

    @abstractmethod
    def runtime(self) -> str | None:
        """Return what torch is built to reach GPUs by, such as `CUDA 13.0`, if it is."""

    @abstractmethod
    def listing(self) -> str:
        """Return the command that lists GPUs and what uses them."""

    def hidden(self) -> str:
        """Return why a process sees fewer GPUs than there are, as the end of a sentence."""
        visible = os.environ.get(self.mask, "")
        return f"; {self.mask}={visible} hides the others" if visible else ""

    # What they are --------------------------------------------------------------------------

    @abstractmethod
    def card(self, gpu: torch.device | int) -> Card:
        """Return what a GPU is."""

    def memory(self, index: int) -> Memory:
        """Return what a GPU has of memory now; starts its driver.

        Raises:
            ConfigError: others have it to themselves, or all of its memory.
        """
        try:
            return Memory(str(self.api.get_device_name(index)), *self.api.mem_get_info(index))
        except RuntimeError as error:
            raise ConfigError(
                f"{self.title} device {index} cannot be used: {reason_of(error)}; end what uses it "
                f"({self.listing()} lists it), or give another device"
            ) from error

    def capability(self, gpu: torch.device | int) -> tuple[int, ...]:
        """Return the generation of a GPU's instructions, if its maker counts them."""
        return ()

    @abstractmethod
    def multiplies_bfloat16(self, gpu: torch.device | int) -> bool:
        """Return whether a GPU multiplies bfloat16 in hardware."""

    def bfloat16_takes(self, gpu: torch.device | int) -> str:
        """Return what one that does has, to be put behind the name of one that does not."""
        return ""

    def tf32_setting(self, gpu: torch.device | int) -> str | None:
        """Return how torch is told to multiply float32 as TF32, if a GPU can."""
        return None

    def why_not_compiled(self, gpu: torch.device | int) -> str | None:
        """Return why Triton cannot compile for a GPU, to be put behind its name."""
        return None

    # How they are used ----------------------------------------------------------------------

    @abstractmethod
    def prepare(self) -> None:
        """Choose the allocator's settings, before the first GPU is used.

        Raises:
            ConfigError: this torch lacks what a device needs.
        """

    def library_bytes(self) -> int:
        """Return what libraries keep of a GPU's budget; from now on their workspaces are that."""
        return 0

    @abstractmethod
    def event(self, *, timed: bool = False) -> Any:
        """Return a new event. A thread that waits for it sleeps if it can, unless it is timed."""

    def registrar(self) -> Registrar:
        """Return what pins memory in place; starts the driver."""
        raise NotImplementedError

    def pinned_empty(self, n_bytes: int) -> Tensor:
        """Return pinned memory (uint8), where none can be pinned in place.

        PyTorch's allocator rounds it up to powers of two.
        """
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def require_deterministic(self) -> None:  # noqa: B027  most have nothing to refuse
        """Refuse an environment in which libraries add in any order.

        Raises:
            ConfigError: says what to set.
        """
