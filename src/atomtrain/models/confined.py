"""A stranger's `config.json` makes a model without the network and without code that others name.

A configuration comes from a model's folder, a checkpoint, or the founder of a run, so it is as
good as a stranger's. What its content may say are sizes and choices, nothing that leads to code;
that is checked wherever a recipe is read, and needs no transformers.

Left out without a word is what the model that is built does not depend on: ATOM builds the class
that transformers itself has for a `model_type`, from the configuration alone. Such are references
to code that would be used in its place, names of where the model came from, and private names
(with an underscore in front), which transformers writes for itself. So is how weights were
quantised, if that is known: it decides how they are read, and the model is wide. What would make
another model, or its numbers by other code, is refused.

The libraries themselves are held to it, for as long as they make something: whatever they would
still look for on a hub is refused.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.nn.modules.module import register_module_module_registration_hook

from atomtrain.errors import ConfigError, nearest

_BITS = {"gptq": (2, 4, 8), "awq": (4,)}
METHODS = ("fp8", "mxfp4", "bitsandbytes", *_BITS)
_INSTEAD = "give another copy, or the model that it was made from"


def check_method(settings: object, what: str) -> None:
    """Refuse what cannot be read.

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
        _check_known("bits", settings.get("bits"), _BITS[method], what)
        _check_group(settings.get("group_size", -1), what)
    if method == "awq":
        _check_known("version", settings.get("version", "gemm"), ("gemm", "GEMM"), what)
    if method == "gptq":
        key = "checkpoint_format"
        _check_known(key, settings.get(key, "gptq"), ("gptq", "gptq_v2"), what)


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


def _check_known(key: str, value: object, known: tuple[Any, ...], what: str) -> None:
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


ATTENTION = (None, "eager", "sdpa")
EXPERTS = (None, "eager", "grouped_mm", "batched_mm")
"""Implementations that are torch's and transformers' own; all others are fetched or installed."""
TYPES = (None, "auto", "float64", "float32", "bfloat16", "float16")
_IMPLEMENTATIONS = {
    "attn_implementation": ATTENTION,
    "_attn_implementation": ATTENTION,
    "_attn_implementation_internal": ATTENTION,
    "experts_implementation": EXPERTS,
    "_experts_implementation": EXPERTS,
    "_experts_implementation_internal": EXPERTS,
    "dtype": TYPES,
    "torch_dtype": TYPES,
}
_LEFT_OUT = {
    "auto_map", "custom_pipelines", "trust_remote_code", "name_or_path", "base_model_name_or_path",
    "use_kernels", "kernel_config", "attn_implementation_autoset",
}  # fmt: skip
_PRIVATE_ONES = {"_attn_implementation", "_experts_implementation", "_remove_final_layer_norm"}
"""Private names that do decide something (the last one OPT's)."""
_BACKBONE = {"backbone", "backbone_kwargs", "use_timm_backbone", "use_pretrained_backbone"}
"""They name a second model, which is looked for on a hub."""
_QUANTISED = {"quantization_config", "compression_config"}
_FOREIGN_KINDS = ("timm_backbone", "timm_wrapper")
"""Built by another package, which takes names of a hub, and pickles."""
_LAYERS = {
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers",
    "decoder_layers", "encoder_layers", "num_nextn_predict_layers",
}  # fmt: skip
_SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "n_embd", "n_head",
    "n_heads", "d_model", "head_dim", "num_key_value_heads", "max_position_embeddings",
    "n_positions", "n_ctx", "moe_intermediate_size", "ffn_dim", "embedding_size",
}  # fmt: skip
_EXPERT_COUNTS = {
    "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts",
    "num_experts_per_tok", "num_routed_experts",
}  # fmt: skip
_WINDOW = "window_size"
"""A side in pixels where attention is to images: as large an array is made of each."""
_MOST_LAYERS, _MOST_EXPERTS, _MOST_WINDOW = 4096, 16384, 16384
_MOST = 1 << 31
_DEEPEST = 16
_FETCHING = ("get_kernel", "get_kernel_hub")
_KERNELS = "kernels"
_FLOAT = "__float__"
"""The only key of what transformers writes in place of a number that JSON does not have."""
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_ABSENT: Any = object()


def checked_config(stored: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return a configuration without what leads to code and changes nothing.

    Args:
        stored: Content of a `config.json`.
        what: How messages call it.

    Raises:
        ConfigError: it asks for what is not built here, or a size cannot be.
    """
    return _mapping(stored, what, 0)


def _mapping(stored: Mapping[str, Any], what: str, depth: int) -> dict[str, Any]:
    if depth > _DEEPEST:
        raise ConfigError(
            f"{what} is nested more than {_DEEPEST} deep; give the configuration of one model"
        )
    kept = {}
    for key, value in stored.items():
        if not isinstance(key, str):
            raise ConfigError(f"{what} has a key {key!r}, which is not a text; leave it out")
        _check(key, value, what)
        private = key.startswith("_") and key not in _PRIVATE_ONES
        if not private and key not in _LEFT_OUT | _BACKBONE | _QUANTISED:
            kept[key] = _value(value, what, depth)
    return kept


def numbers_of(value: Any) -> Any:
    """Return a checked configuration with numbers in place of those that JSON does not have."""
    if isinstance(value, Mapping):
        if _is_number(value):
            return _FLOATS[value[_FLOAT]]
        return {key: numbers_of(item) for key, item in value.items()}
    return [numbers_of(item) for item in value] if isinstance(value, list) else value


def _is_number(value: Mapping[str, Any]) -> bool:
    number = value.get(_FLOAT)
    return len(value) == 1 and isinstance(number, str) and number in _FLOATS


def _value(value: Any, what: str, depth: int) -> Any:
    if isinstance(value, Mapping) and _is_number(value):
        return dict(value)
    if isinstance(value, Mapping):
        return _mapping(value, what, depth + 1)
    if isinstance(value, list | tuple):
        if depth > _DEEPEST:
            raise ConfigError(f"{what} is nested more than {_DEEPEST} deep; give one model's")
        return [_value(item, what, depth + 1) for item in value]
    return value


def _check(key: str, value: Any, what: str) -> None:
    if key in _IMPLEMENTATIONS:
        _check_choice(key, value, what)
    elif key in _QUANTISED and value is not None:
        check_method(value, what)
    elif key in _BACKBONE and value:
        raise ConfigError(
            f"{what} takes a part from another model ({key}), which is not fetched here; give a "
            "model that is whole"
        )
    elif key == "model_type" and value in _FOREIGN_KINDS:
        raise ConfigError(
            f"{what} has a part of type {value!r}, which is not built here; give the text model "
            "alone"
        )
    elif key in _LAYERS:
        _check_size(key, value, what, 0, _MOST_LAYERS)
    elif key == _WINDOW:
        _check_size(key, value, what, 0, _MOST_WINDOW)
    elif key in _EXPERT_COUNTS:
        _check_size(key, value, what, 0, _MOST_EXPERTS)
    elif key in _SIZES:
        _check_size(key, value, what, 0 if key != "vocab_size" else 1, _MOST)


def _check_choice(key: str, value: Any, what: str) -> None:
    allowed = _IMPLEMENTATIONS[key]
    for one in value.values() if isinstance(value, Mapping) else [value]:
        if one not in allowed:
            names = ", ".join(name for name in allowed if name is not None)
            raise ConfigError(
                f"{what} says {key} {one!r}; here it may be {names}: choose one, or remove the key"
            )


def _check_size(key: str, value: Any, what: str, least: int, most: int) -> None:
    for one in value if isinstance(value, list | tuple) else [value]:
        if one is None and least == 0:
            continue
        if not isinstance(one, int) or isinstance(one, bool) or not least <= one <= most:
            raise ConfigError(
                f"{what} says {key} {str(one)[:40]!r}; it must be a whole number from {least} to "
                f"{most}: correct it"
            )


def check_layers(stored: Mapping[str, Any], most: int, what: str) -> None:
    """Refuse a configuration with more layers than there are tensors.

    Raises:
        ConfigError: it has.
    """
    for key, value in stored.items():
        if isinstance(value, Mapping):
            check_layers(value, most, what)
        elif key in _LAYERS and isinstance(value, int) and value > most:
            raise ConfigError(
                f"config.json says {key} {value}, and the weights in {what} are {most} tensors; "
                "both must be of one model"
            )


@contextmanager
def parts_within(most: int, what: str) -> Iterator[None]:
    """Refuse to make a model of more than `most` modules, before it takes long or much memory.

    Raises:
        ConfigError: it has more.
    """
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise ConfigError(
                f"{what} describes a model of more than {most} parts; give a configuration that "
                "fits the weights, and one model's"
            )

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


class _FetchError(FileNotFoundError):
    """Of this kind, since transformers takes it for a kernel that is not there: it goes without."""


@contextmanager
def confined() -> Iterator[None]:
    """Have transformers fetch nothing and say nothing: what is wrong is told in one line.

    No file of a hub is fetched, and no kernel, cached ones included.

    Some of its models ask for compiled kernels of their own accord (RWKV on a GPU): they are
    computed by torch. The package `kernels` and the hub's settings are as before afterwards.
    """
    from huggingface_hub import constants
    from transformers.integrations import hub_kernels  # asks once whether `kernels` is installed
    from transformers.utils.logging import get_verbosity, set_verbosity

    offline, said = constants.HF_HUB_OFFLINE, get_verbosity()
    package = sys.modules.get(_KERNELS, _ABSENT)
    fetching = {name: getattr(hub_kernels, name, _ABSENT) for name in _FETCHING}
    constants.HF_HUB_OFFLINE = True
    set_verbosity(logging.CRITICAL)
    sys.modules[_KERNELS] = None  # type: ignore[assignment]  # `import kernels` fails
    for name, function in fetching.items():
        if function is not _ABSENT:
            setattr(hub_kernels, name, _refuse)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        set_verbosity(said)
        if package is _ABSENT:
            del sys.modules[_KERNELS]
        else:
            sys.modules[_KERNELS] = package
        for name, function in fetching.items():
            if function is not _ABSENT:
                setattr(hub_kernels, name, function)


def _refuse(name: object, *_: object, **__: object) -> NoReturn:
    raise _FetchError(f"the kernel {name} is not fetched: no code comes from a model")


def check_names(stored: Mapping[str, Any], what: str) -> None:
    """Refuse keys, at any depth, that would stand in for transformers' own functions and tables.

    Such a table says which attribute a key sets, and so could lead around every other check.

    Raises:
        ConfigError: there is one.
    """
    taken = _own_names()

    def check(value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                if key in taken:
                    raise ConfigError(
                        f"{what} has a key {key!r}, which is a name of transformers' own; remove it"
                    )
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)

    check(stored)


def _own_names() -> set[str]:
    """Return what every configuration class has besides values: functions and tables."""
    from transformers import PreTrainedConfig

    names = set(dir(PreTrainedConfig)) - set(vars(PreTrainedConfig()))  # no dataclass at first
    values = {name for name in names if isinstance(getattr(PreTrainedConfig, name), property)}
    return names - values - {"model_type"}


def check_made(config: Any, what: str) -> None:
    """Refuse a configuration object that, whatever it was made from, asks for others' code.

    Raises:
        ConfigError: it, or that of a part, does.
    """
    from transformers import PreTrainedConfig

    attention = getattr(config, "_attn_implementation_internal", None)
    experts = getattr(config, "_experts_implementation_internal", None)
    if attention not in ATTENTION or experts not in EXPERTS or hasattr(config, "auto_map"):
        raise ConfigError(
            f"{what} asks for code that is not transformers' own; give the configuration as "
            "transformers saves it"
        )
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            check_made(part, what)
