"""What a run did, in one file to attach to an issue: no data, no addresses, no names.

Numbers are kept. Of words only those are kept that ATOM itself wrote, and in them everything that
looks like an address, an id or a path, and everything that the user has named, is replaced.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from atomtrain.errors import ConfigError
from atomtrain.events import EVENTS_FILE, RECIPE_FILE, read_events
from atomtrain.files import replacing
from atomtrain.models.gpt_config import PRESETS
from atomtrain.topology import machine

FORMAT = 1
VERSIONS = ("atomtrain", "torch", "numpy", "transformers", "hivemind", "safetensors", "tokenizers")
_LEFT_OUT = {"sample"}
"""Kinds of events that hold text of the model, which it may have from the data."""
_OWN_WORDS = {
    "event", "message", "reason", "outcome", "bound", "precision", "text", "kind", "place", "label",
    "state", "device",
}  # fmt: skip
"""Fields of which ATOM has written the words."""
_NAMED = {
    "run", "peer", "data", "directory", "path", "checkpoint", "picture", "join_address", "name",
    "model", "prompt", "host", "announce", "identity", "run_key", "allow",
}  # fmt: skip
"""Fields and options in which the user, or another peer, has named something."""
_LABELLED = {"measured", "predicted"}
"""Lists whose words are the labels of what ATOM did: streams and segments."""
_NAMES = {"members", "joined", "left", "contributors"}
"""Lists of names, of which the number is kept."""
_HIDDEN = (
    (re.compile(r"/(?:ip4|ip6|dns[46]?|unix)/\S+"), "ADDRESS"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "ADDRESS"),
    (re.compile(r"\b(?:[0-9a-fA-F]{0,4}:){4,}[0-9a-fA-F.]*"), "ADDRESS"),
    (re.compile(r"\b(?:12D3Koo|Qm)\w{20,}"), "PEER"),
    (re.compile(r"\bpeer [1-9A-HJ-NP-Za-km-z]{8}\b"), "peer PEER"),
    (re.compile(r"\S+@\S+"), "ADDRESS"),
    (re.compile(r"(?:(?<=\s)|(?<=['\"(])|^)(?:~|\.{1,2})?/[^\s'\"),;:]+"), "PATH"),
)
_LEAST_SECRET = 3
"""Shorter names would take letters out of other words."""


def report_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what can be told of a run, or of one of its peers, as JSON objects.

    First comes the machine, then for each peer its options and its events.

    Raises:
        ConfigError: there are no events in the folder.
    """
    own = folder / EVENTS_FILE
    files = [own] if own.is_file() else sorted(folder.glob(f"*/{EVENTS_FILE}"))
    if not files:
        raise ConfigError(
            f"{folder} holds no events of a run; name the folder of a run or of a peer, such as "
            "runs/mine"
        )
    options = [_options(file.parent / RECIPE_FILE) for file in files]
    secrets = _secrets([*(event for file in files for event in read_events(file)), *options])
    from atomtrain.engine.calibration.profile_cache import kept_profiles  # imports torch

    yield {"format": FORMAT, **surroundings(), "profiles": [*map(_profile, kept_profiles())]}
    for number, (said, file) in enumerate(zip(options, files, strict=True)):
        numbers = {k: v for k, v in said.items() if isinstance(v, bool | int | float)}
        yield {"peer": number, "options": numbers}
        for event in read_events(file):
            if event["event"] not in _LEFT_OUT:
                yield {"peer": number} | _clean({**event, "peer": number}, secrets)


def write_report(folder: Path, out: Path) -> int:
    """Write `report_of` a folder to a file, one JSON object a line; return its bytes.

    Raises:
        ConfigError: there is nothing to report, or the file cannot be written.
    """
    lines = [json.dumps(line, allow_nan=False) + "\n" for line in report_of(folder)]
    try:
        with replacing(out) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({error.strerror}); choose another --out"
        ) from error
    return sum(len(line.encode()) for line in lines)


def surroundings() -> dict[str, Any]:
    """Return the machine and the versions of what matters, without the machine's name."""
    return {
        "machine": machine(),
        "versions": {"python": platform.python_version(), **dict(_versions())},
    }


def hidden(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without addresses, ids, paths, this machine's and its user's name.

    Args:
        text: ATOM's own words.
        secrets: What else is to be replaced, longest first.
    """
    for pattern, instead in _HIDDEN:
        text = pattern.sub(instead, text)
    for secret in (*secrets, *_own_names()):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "NAME", text)
    return text


def _clean(value: Any, secrets: list[str], field: str = "") -> Any:
    """Return a value of an event without what is not to be told."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if field in _NAMES:
        return len(value)
    if field in _NAMED:
        return value if field == "model" and value in PRESETS else None
    if isinstance(value, str):
        return hidden(value, secrets) if field in _OWN_WORDS else None
    if isinstance(value, Mapping):
        return {str(name): _clean(one, secrets, str(name)) for name, one in value.items()}
    inner = "label" if field in _LABELLED else field
    return [_clean(one, secrets, inner) for one in value]


def _secrets(sources: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return all that users and peers have named, longest first."""
    found: set[str] = set()
    for source in sources:
        for field, value in source.items():
            if field not in _NAMED | _NAMES or value is None:
                continue
            for one in value if isinstance(value, list) else [value]:
                found |= {str(one), *re.split(r"[/@,\s]+", str(one))}
    own = {"the", "demo", "corpus", *PRESETS, "runs", "checkpoints"}
    return sorted((s for s in found - own if len(s) >= _LEAST_SECRET), key=len, reverse=True)


def _own_names() -> list[str]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no user of this number
        user = ""
    return [name for name in (platform.node(), user) if len(name) >= _LEAST_SECRET]


def _options(recipe: Path) -> dict[str, Any]:
    import yaml

    try:
        said = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {k.replace("-", "_"): v for k, v in said.items()} if isinstance(said, dict) else {}


def _profile(cache: Any) -> dict[str, Any]:
    key = {name: value for name, value in cache.key.items() if name != "host"}
    machine = cache.machine(1, 1).to_json()
    rates = {k: v for k, v in machine.items() if isinstance(v, bool | int | float)}
    return {"key": key, "rates": {k: v for k, v in rates.items() if "memory_bytes" not in k}}


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in VERSIONS:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, None
