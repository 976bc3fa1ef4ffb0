"""What a stranger's tokenizer may do to a text: its steps are looked at before any text is read.

A step that replaces can make a text longer, several of them exponentially so. A pattern whose
repeated part can be divided in several ways can take exponential time. Published tokenizers have
neither.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atomtrain.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MOST_STEPS, _MOST_GROWTH, _MOST_WORD = 32, 32, 1000
_MOST_REPEATS = 4
"""Of one alternative of a pattern: each may look at all that is left of the text."""
_PART = re.compile(
    r"(?P<refused>\\[gk1-9])|(?P<one>\\(?:[pPx]\{[^}]*\}|.)|\[)|(?P<open>\((?:\?[^)|(]*?[:=!>])?)|"
    r"(?P<close>\))|(?P<or>\|)|(?P<times>[*+?]|\{\d*,?\d*\})(?P<lazy>[?+]?)|(?P<other>.)",
    re.DOTALL,
)


def checked_growth(backend: Backend) -> int:
    """Return how many times longer than a text its tokens' text is at most, roughly.

    Raises:
        DataError: too long, too many steps, or a pattern that may take for ever.
    """
    if getattr(backend.model, "max_input_chars_per_word", 0) > _MOST_WORD:
        raise DataError(_told(f"looks for words of more than {_MOST_WORD} characters"))
    growth = 1.0
    parts = {"normalizer": 1, "pre_tokenizer": 1, "decoder": 0}  # the last one is not for texts
    for name, counts in parts.items():
        part = getattr(backend, name)
        steps = [] if part is None else list(_steps(json.loads(part.__getstate__())))
        if len(steps) > _MOST_STEPS:
            raise DataError(_told(f"has {len(steps)} steps, at most {_MOST_STEPS} are taken"))
        for step in steps:
            if isinstance(pattern := step.get("pattern"), dict) and "Regex" in pattern:
                check_pattern(pattern["Regex"])
            growth *= _growth(step) ** counts
    if growth > _MOST_GROWTH:
        raise DataError(_told(f"makes texts up to {growth:.3g} times longer"))
    return round(growth)


def check_pattern(pattern: str) -> None:
    """Refuse a regular expression that may take exponential time, or a high power of the text's.

    Raises:
        DataError: it repeats a part that can be divided in several ways, or repeats too often.
    """
    repeats = _Repeats()
    at = 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        assert part is not None
        at = _class_end(pattern, at) if part["one"] == "[" else part.end()
        if part["refused"] or not repeats.take(part):
            raise DataError(
                _told(f"has a pattern that may take for ever on some text ({pattern[:80]!r})")
            )


class _Repeats:
    """What of a pattern varies, group by group."""

    def __init__(self) -> None:
        self._outer: list[tuple[int, int, bool]] = []
        self._count = self._most = 0
        self._varies = False
        self._last = (0, False)  # of the part before: repeats, and whether it varies

    def take(self, part: re.Match[str]) -> bool:
        """Take the next part; return whether all is well."""
        if part["open"]:
            self._outer.append((self._count, self._most, self._varies))
            self._count, self._most, self._varies, self._last = 0, 0, False, (0, False)
        elif part["close"]:
            inner = max(self._most, self._count), self._varies
            count, self._most, self._varies = self._outer.pop() if self._outer else (0, 0, False)
            self._count, self._last = count + inner[0], inner
            self._varies |= inner[1]
        elif part["or"]:
            self._most, self._count = max(self._most, self._count), 0
            self._varies = True
        elif part["times"]:
            return self._repeat(part["times"])
        else:
            self._last = (0, False)
        return self._count <= _MOST_REPEATS

    def _repeat(self, times: str) -> bool:
        if times == "?" or times in ("{0,1}", "{,1}"):
            self._varies = True
            return True
        if self._last[1]:
            return False
        if "," in times or times in "*+":
            self._varies = True
            self._count += times in "*+" or times.endswith(",}")
            self._last = (self._last[0], True)
        return self._count <= _MOST_REPEATS


def _class_end(pattern: str, at: int) -> int:
    """Return where a set of characters ends; sets may hold sets."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
        elif pattern[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at


def _steps(stored: Any) -> Iterator[dict[str, Any]]:
    """Yield all steps at any depth that are not lists of others."""
    for key in ("normalizers", "pretokenizers", "decoders"):
        if key in stored:
            for step in stored[key]:
                yield from _steps(step)
            return
    yield stored


def _growth(step: dict[str, Any]) -> float:
    """Return by what a step multiplies the length of a text at most."""
    kind, content = step.get("type"), str(step.get("content", ""))
    if kind == "Replace":
        replaced = step["pattern"].get("String")
        if replaced:
            return max(1.0, len(content) / len(replaced))
        return 1.0 + len(content)  # it may match between all characters
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend", ""))) / _MOST_WORD
    if kind == "ByteLevel":
        return 2.0
    if kind == "Precompiled":
        table = base64.b64decode(step.get("precompiled_charsmap") or "")
        texts = table[4 + int.from_bytes(table[:4], "little") :]
        return max(1.0, max((len(text) for text in texts.split(b"\0")), default=0) / 4)
    return 1.0


def _told(what: str) -> str:
    return f"the tokenizer {what}; give the tokenizer.json as its model was published with"
