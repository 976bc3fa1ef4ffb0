"""Errors that a user can meet. Each message says what was given, what is allowed, what to do next.

The command line prints the message of an `AtomError` on one line and exits with its `exit_code`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable

_MOST_NAMES, _LONGEST_NAME = 10_000, 200
"""Looked at to find a near one: a stranger's names may be many and long."""


class AtomError(Exception):
    """Base of every error that ATOM raises on purpose."""

    exit_code = 2


class ConfigError(AtomError, ValueError):
    """An option, a name or a number that cannot be used."""

    field: str | None = None
    """The option that is wrong by itself, if its check has found that."""


class AnalysisError(AtomError):
    """A model that cannot be turned into a chain of layers."""


class PlanError(AtomError):
    """No plan fits the given budgets."""


class DeviceMemoryError(AtomError, MemoryError):
    """The device budget would be exceeded."""


class StreamError(AtomError, RuntimeError):
    """A transfer or a host update failed, or did not finish by its deadline."""

    exit_code = 1


class DiskError(StreamError):
    """A disk that holds part of the host's state cannot be used, is full, or failed."""


class DataError(AtomError):
    """Text, tokenizer or token file that cannot be used."""


class CheckpointError(AtomError):
    """A checkpoint that cannot be written, read, or used with this model."""


class SwarmError(AtomError):
    """A swarm that cannot be started, reached or joined."""


class BadMessage(SwarmError):  # noqa: N818 - what it is reads better than what it raises
    """A peer sent something that this protocol does not allow."""


def reason_of(error: BaseException) -> str:
    """Return the first line of what an error says, as a part of a sentence: no full stop."""
    return str(error).strip().partition("\n")[0].rstrip(". ")


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the allowed name nearest to `given`, or `""`."""
    names = [name for name in itertools.islice(allowed, _MOST_NAMES) if len(name) <= _LONGEST_NAME]
    close = difflib.get_close_matches(given[:_LONGEST_NAME], names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def choices(given: str, allowed: Iterable[str]) -> str:
    """Return `"a, b or c"`, and if one is near to what was given a sentence behind it."""
    names = list(allowed)
    text = ", ".join(names[:-1]) + f" or {names[-1]}"
    hint = nearest(given, names)
    return f"{text}.{hint}" if hint else text
