"""What torch writes down for people while it exports, left out where nobody reads it.

Of each operation torch keeps the stack, and of each graph under way it makes source code. Together
that takes a fifth of an export.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch.fx import _lazy_graph_module, proxy

INNER = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))
"""Folders of code that is not the user's."""


class _Innermost:
    """The innermost `forward` of the user's. It stands for the whole stack, as torch keeps it."""

    def __init__(self, frame: FrameType | None) -> None:
        while frame is not None and not _is_forward(frame):
            frame = frame.f_back
        self._frame = frame

    @classmethod
    def extract(cls, **_: object) -> _Innermost:
        return cls(sys._getframe(1))

    def summary(self) -> traceback.StackSummary:
        frame = self._frame
        if frame is None:
            return traceback.StackSummary()
        code = frame.f_code
        line = traceback.FrameSummary(
            code.co_filename, frame.f_lineno, code.co_name, lookup_line=False
        )
        return traceback.StackSummary.from_list([line])


def _is_forward(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "forward" and not code.co_filename.startswith(INNER)


@contextmanager
def plain_trace() -> Iterator[None]:
    """Have torch keep of each operation's stack the innermost line, and make no source code."""
    names = vars(proxy)
    whole, names["CapturedTraceback"] = names["CapturedTraceback"], _Innermost
    try:
        with _lazy_graph_module._use_lazy_graph_module(True):
            yield
    finally:
        names["CapturedTraceback"] = whole
