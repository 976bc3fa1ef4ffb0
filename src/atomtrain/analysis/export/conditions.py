"""Under what conditions a model is exported: unawares, quietly, with every backward kept,
and without changing the model."""

from __future__ import annotations

import gc
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import nn

from atomtrain.errors import AnalysisError

MANUAL = "or give the layers by hand: layers=['path.of.module', ...]"
_REGISTERED = "GeneratedBackwardFor"
"""Functions of this name belong to operations that graphs keep, with their backward."""


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
def no_functions() -> Iterator[None]:
    """Refuse operations with a backward of their own: a graph would keep their forward only."""
    original = torch.autograd.Function.__dict__["apply"]

    def refuse(function: type, *args: Any, **kwargs: Any) -> Any:
        if function.__name__.startswith(_REGISTERED):
            return original.__get__(None, function)(*args, **kwargs)
        raise AnalysisError(
            f"forward uses {function.__name__}, a torch.autograd.Function, whose backward would "
            f"be lost; register it as an operation (torch.library.custom_op), {MANUAL}"
        )

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


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


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what forward could change beside tensors, by module."""
    plain = (bool, int, float, str, type(None))
    return {
        path: {
            name: len(value) if isinstance(value, list | dict | set) else value
            for name, value in vars(module).items()
            if isinstance(value, plain) or (isinstance(value, list | dict | set) and name[0] != "_")
        }
        for path, module in model.named_modules()
    }


def check_side_effects(model: nn.Module, before: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `AnalysisError` if forward changed what `attributes_of` returned before it."""
    for path, attributes in attributes_of(model).items():
        changed = [
            name
            for name, value in attributes.items()
            if name not in before.get(path, {}) or before[path][name] != value
        ]
        if changed:
            raise AnalysisError(
                f"forward changes the attribute {changed[0]!r} of module {path!r}, which would "
                "happen once instead of in every step; keep such a state in a registered buffer, "
                + MANUAL
            )
