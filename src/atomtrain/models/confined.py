"""Models and tokenizers are made without the network, and without code that others name.

`config_keys` decides what a configuration may say. Here the libraries themselves are held to it,
for as long as they make something: whatever they would still look for on a hub is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn

from atomtrain.errors import ConfigError
from atomtrain.models.config_keys import ATTENTION, EXPERTS

_FETCHING = ("get_kernel", "get_kernel_hub")
_KERNELS = "kernels"
_ABSENT: Any = object()


class _FetchError(FileNotFoundError):
    """Of this kind, since transformers takes it for a kernel that is not there: it goes without."""


@contextmanager
def confined() -> Iterator[None]:
    """Have transformers fetch nothing: no file of a hub, and no kernel, cached ones included.

    Some of its models ask for compiled kernels of their own accord (RWKV on a GPU): they are
    computed by torch. The package `kernels` and the hub's settings are as before afterwards.
    """
    from huggingface_hub import constants
    from transformers.integrations import hub_kernels  # asks once whether `kernels` is installed

    offline = constants.HF_HUB_OFFLINE
    package = sys.modules.get(_KERNELS, _ABSENT)
    fetching = {name: getattr(hub_kernels, name, _ABSENT) for name in _FETCHING}
    constants.HF_HUB_OFFLINE = True
    sys.modules[_KERNELS] = None  # type: ignore[assignment]  # `import kernels` fails
    for name, function in fetching.items():
        if function is not _ABSENT:
            setattr(hub_kernels, name, _refuse)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
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

    names = set(dir(PreTrainedConfig)) - {field.name for field in fields(PreTrainedConfig)}
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
