"""What must hold while a model is exported, or the graph would not do what the model does.

The model does not notice, seems to be on its device, and is not changed.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from atomtrain.errors import AnalysisError

CPU = torch.device("cpu")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MANUAL = "or give the layers by hand: layers=['path.of.module', ...]"
_GROUPED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROW_BYTES = 16
"""Rows of grouped products begin at multiples of it, those of the result too."""
_TRACING = threading.RLock()
"""Held while a model is traced, which exchanges functions of the whole process."""
_ASKS = "transformers.integrations.moe"
_DATA: Any = vars(torch._C.TensorBase)["data"].__get__
_TENSOR_HOOKS = "register_hook", "register_post_accumulate_grad_hook"


class Way(NamedTuple):
    """How a model is told that it runs while it is traced."""

    device: torch.device
    as_eager: bool
    """Nobody traces it; libraries take other paths when they are traced."""

    def told(self, device: torch.device) -> str:
        """Return in words what of this is not as when it runs on `device`."""
        other_device = f"as on {self.device}" if self.device != device else ""
        other_paths = "" if self.as_eager else "as its code runs when it is traced"
        return " and ".join(part for part in (other_device, other_paths) if part)


def ways_to_trace(device: torch.device) -> list[Way]:
    """Return the ways to try, the most faithful first.

    A torch that was not built for a GPU ends the process where autograd meets a tensor on one, be
    it a fake one. There is no GPU to run on either. The meta device is in every torch.
    """
    built = torch.accelerator.current_accelerator()  # for which kind, whether there is one or not
    reached = {"meta", built.type if built is not None else "meta"}
    devices = [device, CPU] if device.type in reached else [CPU]
    return [Way(seeming, as_eager) for as_eager in (True, False) for seeming in devices]


@contextmanager
def only_torch_draws() -> Iterator[None]:
    """Refuse forward to draw random numbers of Python or NumPy: all steps would have the same.

    Their generators are left as they were. Other threads may draw Python's meanwhile, and wait to
    trace models of their own.

    Raises:
        AnalysisError: it draws some.
    """
    drawn = []
    with _TRACING:
        arrays = np.random.get_state(legacy=False)
        try:
            with _python_noted() as python:
                yield
            if python:
                drawn.append("Python")
            if _words(np.random.get_state(legacy=False)) != _words(arrays):
                drawn.append("NumPy")
        finally:
            np.random.set_state(arrays)
    if drawn:
        raise AnalysisError(
            f"forward draws random numbers of {' and '.join(drawn)}, which would be the same in "
            "every step; turn off what draws them (such as apply_spec_augment), draw them with "
            f"torch, {MANUAL}"
        )


@contextmanager
def _python_noted() -> Iterator[list[str]]:
    """Yield a list of what this thread draws from Python's generator, from one of its own."""
    shared = cast(random.Random, random.seed.__self__)  # type: ignore[attr-defined]
    me, own, drawn, others = threading.get_ident(), random.Random(0), list[str](), list[str]()

    def noted(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any) -> Any:
            if threading.get_ident() != me:
                others.append(name)
                return usual(*args)
            drawn.append(name)
            return getattr(own, name)(*args)

        return draw

    with ExitStack() as stack:

        def instead(holder: Any, name: str, value: Any) -> None:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)

        instead(shared, "gauss_next", None)  # would be returned without a draw
        for name in ("random", "getrandbits"):  # all other methods call these
            for holder in (random, shared):
                instead(holder, name, noted(name, getattr(holder, name)))
        before = shared.getstate()
        yield drawn
        if not drawn and not others and shared.getstate() != before:
            shared.setstate(before)
            drawn.append("random")  # by a name of before, as `from random import random` makes


def _words(state: Any) -> tuple[Any, ...]:
    return state["state"]["pos"], state["has_gauss"], state["state"]["key"].tobytes()


@contextmanager
def hidden() -> Iterator[None]:
    """Let models take the paths that they take when nobody traces them."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {
        flag: getattr(torch.compiler, flag) for flag in flags if hasattr(torch.compiler, flag)
    }
    try:
        for flag in before:
            setattr(torch.compiler, flag, False)
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)


@contextmanager
def seeming_on(device: torch.device) -> Iterator[None]:
    """Let all tensors that a model is traced with seem to be on a device, wherever they are.

    Tracing replaces them by fake ones, which need neither the device nor memory. So code that asks
    for the device takes the branch of the one that will run it.
    """
    original = MetaTensorDescriber.describe_tensor

    def describe(self: MetaTensorDescriber, tensor: Tensor, **kwargs: Any) -> Any:
        return dataclasses.replace(original(self, tensor, **kwargs), device=device)

    MetaTensorDescriber.describe_tensor = describe  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        MetaTensorDescriber.describe_tensor = original  # type: ignore[method-assign]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from printing graphs and stacks of what fails; our error says it in one line."""
    loggers = [
        logging.getLogger(name) for name in ("torch._subclasses", "torch.fx", "torch.export")
    ]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the garbage collector: the many small objects of a graph cost a quarter more time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _caller() -> str:
    """Return the module, not one of torch, that calls what a mode sees."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "torch":
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


class DataAndPlaces(TorchFunctionMode):
    """Traces the `.data` of a parameter as what shares its memory and has no gradient.

    transformers asks torch up to 2.10 whether matrices begin at multiples of 16 bytes, as all do
    that PyTorch or a device made.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _DATA and isinstance(args[0], nn.Parameter):
            return args[0].detach()
        if func == Tensor.data_ptr and _caller() == _ASKS:
            return 0
        return func(*args, **(kwargs or {}))


@contextmanager
def without_hooks() -> Iterator[None]:
    """Refuse forward to hook into gradients, or into what autograd saves: no graph would do it.

    Those that torch itself hooks into what is saved, to put it elsewhere or to recompute it, give
    back the same values, so a graph without them has the same gradients.

    Raises:
        AnalysisError: within, where it does.
    """
    usual = {name: getattr(Tensor, name) for name in _TENSOR_HOOKS}

    def instead(name: str) -> Callable[..., Any]:
        def hook(tensor: Tensor, call: Callable[..., Any]) -> Any:
            if not isinstance(tensor, FakeTensor | FunctionalTensor):
                return usual[name](tensor, call)
            raise AnalysisError(
                f"forward calls {name} on a tensor, a hook that swapped training would not call; "
                "change the gradient by what forward does (a torch.autograd.Function), " + MANUAL
            )

        return hook

    me, enter = threading.get_ident(), saved_tensors_hooks.__enter__

    def entered(hooks: saved_tensors_hooks) -> None:
        own = getattr(hooks.pack_hook, "__module__", None) or ""
        if threading.get_ident() == me and not own.startswith("torch."):
            raise AnalysisError(
                "forward hooks into what autograd saves (saved_tensors_hooks), which swapped "
                f"training would not do; leave it out, {MANUAL}"
            )
        enter(hooks)

    for name in _TENSOR_HOOKS:
        setattr(Tensor, name, instead(name))
    saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
        for name, call in usual.items():
            setattr(Tensor, name, call)


def check_dtypes(model: nn.Module) -> None:
    """Raise `AnalysisError` if a trainable parameter is of a type that cannot be trained."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in FLOATS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise AnalysisError(
                f"parameter {name!r} is of {parameter.dtype}; trainable are {allowed}; convert "
                "the model with model.to(torch.float32), or freeze the parameter"
            )


def _fake_grouped_mm(
    mode: FakeTensorMode,
    operation: object,
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what a product of groups of rows returns but for the data; refuse what it refuses.

    torch's own rule for them knows bfloat16 only, although they run in other types too. Without
    this one a model in float32 (a mixture of experts) could only be traced on the path that its
    code takes when it is traced, whose bits are not those of the path that it takes when it runs.
    """
    for matrix in (left, right):
        if matrix.dtype not in _GROUPED_TYPES:
            raise RuntimeError(f"grouped_mm does not take {matrix.dtype}")
        if max(matrix.stride()[-2:]) * matrix.element_size() % _ROW_BYTES:
            raise RuntimeError("grouped_mm takes only rows at multiples of 16 bytes")
    rows, columns = left.shape[-2], right.shape[-1]
    dtype = out_dtype or left.dtype
    each = _ROW_BYTES // dtype.itemsize
    width = -(-columns // each) * each
    if left.dim() != right.dim():  # one of them holds the groups of the other's rows
        return left.new_empty_strided((rows, columns), (width, 1), dtype=dtype)
    groups = left.shape[0] if offs is None else offs.shape[0]
    shape = groups, rows, columns
    return left.new_empty_strided(shape, (rows * width, width, 1), dtype=dtype)


if hasattr(torch.ops.aten, "_grouped_mm"):
    op_implementations_dict.setdefault(torch.ops.aten._grouped_mm.default, _fake_grouped_mm)
