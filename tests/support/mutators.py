"""Small changes that make an honest file a hostile one; what is random comes from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]
"""Changes something in a folder."""


def put(name: str, content: str | bytes) -> Change:
    """Replace a file."""

    def change(folder: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(data)

    return change


def edit(name: str, **values: Any) -> Change:
    """Give other values to keys of a JSON file."""

    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def damage(name: str, seed: int, size: int = 64) -> Change:
    """Write random bytes over a place in the first half of a file."""

    def change(folder: Path) -> None:
        draw = random.Random(seed)
        data = bytearray((folder / name).read_bytes())
        at = draw.randrange(max(1, len(data) // 2 - size))
        data[at : at + size] = draw.randbytes(size)
        (folder / name).write_bytes(data)

    return change


def cut(name: str, share: float) -> Change:
    """Leave of a file only its beginning."""

    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return change


def nested(depth: int, *, lists: bool = False) -> str:
    """Return JSON that is so deep."""
    begin, end = ("[", "]") if lists else ('{"a":', "}")
    return begin * depth + "1" + end * depth


def swapped(name: str, key: str, seed: int) -> Change:
    """Give a key of a JSON file a value of another type."""
    others: list[Any] = [None, True, -1, 2**63, 1e308, "x", [], [[]], {}, {"a": {}}]

    def change(folder: Path) -> None:
        file = folder / name
        stored = json.loads(file.read_text())
        draw = random.Random(seed)
        stored[key] = draw.choice([o for o in others if type(o) is not type(stored.get(key))])
        file.write_text(json.dumps(stored))

    return change
