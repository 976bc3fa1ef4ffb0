"""What a `config.json` may say of how its weights were quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atomtrain.errors import ConfigError, nearest

_BITS = {"gptq": (2, 4, 8), "awq": (4,)}
METHODS = ("fp8", "mxfp4", "bitsandbytes", *_BITS)
_INSTEAD = "give another copy, or the model that it was made from"


def check_method(settings: object, what: str) -> None:
    """Refuse what cannot be read.

    Args:
        settings: The `quantization_config`.
        what: How messages call its file.

    Raises:
        ConfigError: the method or its layout is not known here.
    """
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(settings, Mapping) or method not in METHODS:
        raise ConfigError(
            f"the model of {what} is quantised by {str(method)[:40]!r}, which is not read here."
            f"{nearest(str(method), METHODS)} Methods: {', '.join(METHODS)}; {_INSTEAD}"
        )
    if method == "fp8":
        _check_block(settings.get("weight_block_size"), what)
    if method in _BITS:
        _check_choice(settings, "bits", _BITS[method], what)
        _check_group(settings.get("group_size", -1), what)
    if method == "awq":
        _check_choice({"version": "gemm", **settings}, "version", ("gemm", "GEMM"), what)
    if method == "gptq":
        stored = {"checkpoint_format": "gptq", **settings}
        _check_choice(stored, "checkpoint_format", ("gptq", "gptq_v2"), what)


def quantisation_of(stored: object, what: str) -> dict[str, Any] | None:
    """Return the `quantization_config` of a configuration; `None` if it has none.

    Raises:
        ConfigError: as `check_method`.
    """
    settings = stored.get("quantization_config") if isinstance(stored, Mapping) else None
    if settings is None:
        return None
    check_method(settings, what)
    return dict(settings)


def _check_choice(settings: Mapping[str, Any], key: str, known: tuple[Any, ...], what: str) -> None:
    value = settings.get(key)
    if value not in known:
        raise ConfigError(
            f"{what} says {key} {str(value)[:40]!r} of its quantised weights; read are "
            f"{', '.join(str(each) for each in known)}: {_INSTEAD}"
        )


def _check_block(block: object, what: str) -> None:
    if block is None:
        return
    sizes = block if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(
            f"{what} says weight_block_size {str(block)[:40]!r}; it must be two positive whole "
            "numbers, such as [128, 128]: correct it"
        )


def _check_group(group: object, what: str) -> None:
    if type(group) is not int or not (group == -1 or group > 0):
        raise ConfigError(
            f"{what} says group_size {str(group)[:40]!r}; it must be a positive whole number, or "
            "-1 for all inputs: correct it"
        )
