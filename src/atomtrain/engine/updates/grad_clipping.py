"""Clips a step's gradients by their global norm, and skips the step if one of them overflowed.

Norms are taken block by block as gradients arrive, on the update stream; the decision is made once
all are known, and every update of the step follows it.

`torch.linalg.vector_norm` defines the norms: one thread adds squares in float32 and in one order,
so no number of threads changes a bit. The compiled kernel keeps that order, takes a parameter on
each thread, and reads 16 bits without a float32 copy. Before it is used for a type, it is tried
beside PyTorch, as updates are.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atomtrain.engine.devices.streams import Event, Stream, finished
from atomtrain.engine.state.precision import LossScale
from atomtrain.native import library
from atomtrain.native.library import GRADIENTS, address

_LOG = logging.getLogger(__name__)
_SPIKE = 4096.0
"""Beside its square, float32 loses a square of 1: which sums it is in tells their order."""
_SPIKED = 1 << 21 | 13
_ENDS = 24
"""Sizes beside these differ in what fills no step of the kernel."""


def norms(gradients: Sequence[Tensor], *, wide: bool) -> list[Tensor]:
    """Return the Euclidean norm of each gradient, a scalar on the CPU.

    Args:
        gradients: On the CPU, of float32, bfloat16 or float16.
        wide: Take them as float32; else each norm is rounded to its gradient's type.
    """
    core = library.core()
    found = [torch.empty((), dtype=torch.float32) for _ in gradients]

    def take(index: int) -> None:
        gradient = gradients[index]
        # A single element's norm is its magnitude, not the root of its square.
        plain = gradient.is_contiguous() and gradient.numel() > 1
        if core is not None and plain and equal(gradient.dtype, wide):
            _compiled(core, gradient, wide, found[index])
            found[index] = found[index] if wide else found[index].to(gradient.dtype)
        else:
            found[index] = torch_norm(gradient, wide)

    def hand(indices: Sequence[int]) -> None:
        for index in indices:
            take(index)

    hands = library.dealt([gradient.numel() for gradient in gradients], library.threads())
    library.share([functools.partial(hand, indices) for indices in hands])
    return found


def torch_norm(gradient: Tensor, wide: bool) -> Tensor:
    """Return the norm that defines the bits."""
    norm: Tensor = torch.linalg.vector_norm(gradient.float() if wide else gradient, 2.0)
    return norm


def _compiled(core: ctypes.CDLL, gradient: Tensor, wide: bool, out: Tensor) -> None:
    """Write the norm of a contiguous gradient to a float32 scalar, not rounded."""
    core.atom_norm(
        address(gradient), ctypes.c_int64(gradient.numel()),
        ctypes.c_int32(GRADIENTS[gradient.dtype]), ctypes.c_int32(wide), address(out),
    )  # fmt: skip


@functools.cache
def equal(dtype: torch.dtype, wide: bool) -> bool:
    """Return whether the compiled kernel takes gradients of a type, and gives PyTorch's bits."""
    core = library.core()
    # PyTorch's threads share a float16 sum, so its bits depend on their number.
    if core is None or dtype not in GRADIENTS or (dtype is torch.float16 and not wide):
        return False
    out = torch.empty((), dtype=torch.float32)
    for gradient in _tried(dtype):
        _compiled(core, gradient, wide, out)
        expected = torch_norm(gradient, wide)
        if not torch.equal(out.to(expected.dtype), expected):
            _LOG.warning(
                "norms of %s gradients are PyTorch's, which is slower: the compiled core gives "
                "other bits than this PyTorch (%s)", dtype, torch.__version__,
            )  # fmt: skip
            return False
    return True


def _tried(dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield gradients on which another order of sums, or another rounding, shows."""
    drawn = torch.Generator().manual_seed(1)
    for size in [base + more for base in (2, 1000) for more in range(_ENDS)] * 4:
        yield torch.randn(size, generator=drawn).to(dtype)
    for at in (0, 13, _SPIKED - 20, _SPIKED - 1):
        spiked = torch.ones(_SPIKED, dtype=dtype)
        spiked[at] = _SPIKE
        yield spiked


@dataclass
class Decision:
    """What all gradients of a step together say about its updates; known before any begins."""

    coefficient: Tensor | None = None
    """What gradients are multiplied by, in their own type."""
    factor: float = 1.0
    """What they are multiplied by as float32, by the optimizer."""
    skip: bool = False


class GradClipping:
    """Decides by how much a step's gradients are clipped, and whether the step is skipped."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        clip_norm: float | None,
        loss_scale: LossScale | None,
    ) -> None:
        """Decide nothing unless there is something to decide.

        Args:
            parameters: Those that are trained, in the model's order.
            clip_norm: Most global norm of a step's gradients; `None` does not clip.
            loss_scale: By what the loss is multiplied; `None` is 1.
        """
        self._parameters, self._clip_norm = parameters, clip_norm
        self.loss_scale = loss_scale
        """By what the loss is multiplied; a step whose gradients overflow is skipped."""
        self.decided = finished()
        """Done when all of the last step's gradients have been looked at."""
        self.decision = Decision()
        """What is true of the last step's updates, once `decided` is done."""
        self.gradient_norm: float | None = None
        """Global norm before clipping of the last finished step, if clipping is on."""
        self._norms: dict[int, Tensor] = {}
        self._measured: list[Event] = []

    @property
    def waits(self) -> bool:
        """Whether updates wait for the norm of all gradients: to clip, or to find overflows."""
        return self._clip_norm is not None or self.loss_scale is not None

    def begin(self) -> None:
        """Start a step."""
        # New ones: jobs of the step before may still use theirs.
        self._norms, self._measured = {}, []

    def measure(
        self,
        stream: Stream,
        members: Sequence[nn.Parameter],
        touched: Collection[int],
        gradient_of: Callable[[nn.Parameter], Tensor],
        after: Sequence[Event],
    ) -> None:
        """Queue the norms of a block's gradients on the host.

        Args:
            stream: Of updates.
            members: The parameters of the block.
            touched: Those that have gradients, by `id`, once `after` are done.
            gradient_of: Returns a parameter's gradient.
            after: Done when the gradients are there.
        """
        known, wide = self._norms, self.loss_scale is not None

        def measure() -> None:
            there = [parameter for parameter in members if id(parameter) in touched]
            # Wide: as the update takes it.
            found = norms([gradient_of(p) for p in there], wide=wide)
            known.update(zip(map(id, there), found, strict=True))

        self._measured.append(stream.submit(measure, after))

    def measured(self, norms: Mapping[int, Tensor], event: Event) -> None:
        """Take note of norms of gradients on the device, on the host once `event` is done."""
        self._norms.update(norms)
        self._measured.append(event)

    def decide(self, stream: Stream) -> Decision:
        """Queue the decision about the step; return what will hold it once `decided` is done."""
        decision = self.decision = Decision()
        self.decided = stream.submit(self._job(self._norms, decision), self._measured)
        return decision

    def scale_of_loss(self) -> float:
        """Return by what this step's loss is multiplied; waits until the step before has decided.

        1 if losses are not scaled.
        """
        if self.loss_scale is None:
            return 1.0
        self.decided.wait()
        return self.loss_scale.scale

    def _job(self, norms: Mapping[int, Tensor], decision: Decision) -> Callable[[], None]:
        def decide() -> None:
            # The same operations in the same order as torch.nn.utils.clip_grad_norm_.
            ordered = [norms[id(p)] for p in self._parameters if id(p) in norms]
            if not ordered:
                return
            total = torch.linalg.vector_norm(torch.stack(ordered), 2.0)
            if self.loss_scale is not None:
                decision.factor = 1 / self.loss_scale.scale
                total = total * decision.factor
                decision.skip = not bool(torch.isfinite(total))
                self.loss_scale.decide(finite=not decision.skip)
            if self._clip_norm is None:
                return
            self.gradient_norm = float(total)
            coefficient = torch.clamp(self._clip_norm / (total + 1e-6), max=1.0)
            if self.loss_scale is None:
                decision.coefficient = coefficient
            else:  # the gradients stay as they are: in float16 they would be rounded again
                decision.factor *= float(coefficient)

        return decide
