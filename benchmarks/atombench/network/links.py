"""Links as people write them: `100Mbit/s,50ms,0.5%`, or `rtx-3090,100Mbit/s,30ms,gpt3-xl`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from atombench.links.shaping import Link
from atombench.network.setup import StandsFor
from atomtrain.errors import ConfigError, nearest
from atomtrain.models import PRESETS
from atomtrain.planning.catalogue import GPUS
from atomtrain.units import parse_rate

UNSHAPED = "unshaped"
_TIME = re.compile(r"([0-9.]+)(ms|s)")
_SHARE = re.compile(r"([0-9.]+)%")
_RATE = re.compile(r"[0-9.]+[a-z]*/s", re.IGNORECASE)
_FORM = (
    "RATE[,ROUND TRIP][,LOSS], such as 100Mbit/s,50ms,0.5%; add a GPU, and perhaps a model, "
    "for a link slowed until it stands for that GPU's, such as rtx-3090,100Mbit/s,30ms,gpt3-xl"
)


def parse_links(texts: Sequence[str]) -> tuple[tuple[Link, ...], tuple[StandsFor, ...]]:
    """Return the links of `--link`: those that are themselves, and those that stand for a GPU's.

    Raises:
        ConfigError: a part that is none of rate, round trip, loss, GPU and model, or is there
            twice; a link without a rate; a model without a GPU.
    """
    found = [_parse(text) for text in texts]
    plain = tuple(link for link in found if isinstance(link, Link))
    return plain, tuple(link for link in found if isinstance(link, StandsFor))


def _parse(text: str) -> Link | StandsFor:
    known: dict[str, str] = {}
    for part in text.replace(" ", "").split(","):
        kind = _kind(part, text)
        if kind in known:
            two = f"{known[kind]}, {part}"
            raise ConfigError(f"--link {text!r} has two of a kind: {two}; write {_FORM}")
        known[kind] = part
    if "rate" not in known:
        raise ConfigError(f"--link {text!r} has no rate; write {_FORM}")
    if "model" in known and "GPU" not in known:
        raise ConfigError(f"--link {text!r} has a model but no GPU; write {_FORM}")
    rate = None if known["rate"] == UNSHAPED else 8 * parse_rate(known["rate"], "--link")
    round_trip_s = _seconds(known["time"], text) if "time" in known else 0.0
    loss_share = _number(known["loss"][:-1], text) / 100 if "loss" in known else 0.0
    link = Link(bits_per_s=rate, round_trip_s=round_trip_s, loss_share=loss_share)
    if "GPU" not in known:
        return link
    if rate is None:
        raise ConfigError(f"--link {text!r}: a GPU's link needs a rate; write {_FORM}")
    return StandsFor(known["GPU"], rate, known.get("model"), round_trip_s, loss_share)


def _kind(part: str, text: str) -> str:
    if part == UNSHAPED or _RATE.fullmatch(part):
        return "rate"
    if _TIME.fullmatch(part):
        return "time"
    if _SHARE.fullmatch(part):
        return "loss"
    if part in GPUS:
        return "GPU"
    if part in PRESETS:
        return "model"
    hint = nearest(part, [*GPUS, *PRESETS, UNSHAPED])
    raise ConfigError(f"--link {text!r}: {part!r} is nothing that a link has.{hint} Write {_FORM}")


def _seconds(part: str, text: str) -> float:
    match = _TIME.fullmatch(part)
    assert match is not None
    return _number(match[1], text) / (1000 if match[2] == "ms" else 1)


def _number(digits: str, text: str) -> float:
    try:
        return float(digits)
    except ValueError:
        raise ConfigError(f"--link {text!r}: {digits!r} is no number; write {_FORM}") from None
