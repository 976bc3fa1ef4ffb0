"""Modules that are trained themselves beside adapters: `modules_to_save`, as `peft` calls them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from atomtrain.errors import ConfigError, nearest
from atomtrain.models.image_text import in_tower as is_in_tower
from atomtrain.models.lora_config import LoraConfig


def saved_modules(
    model: nn.Module, config: LoraConfig, *, in_tower: bool = False
) -> dict[str, nn.Module]:
    """Return the modules that are trained themselves, by their path; of what lies within another
    one, the other one.

    Raises:
        ConfigError: no module with parameters has such a name.
    """
    known = {
        path: module
        for path, module in model.named_modules()
        if path and any(True for _ in module.parameters())
        if in_tower or not is_in_tower(model, path)
    }
    found: dict[str, nn.Module] = {}
    for name in config.modules_to_save:
        named = {path: m for path, m in known.items() if f".{path}".endswith(f".{name}")}
        if not named:
            lasts = sorted({path.rpartition(".")[2] for path in known} - _numbers(known))
            raise ConfigError(
                f"--lora modules_to_save={name} is not a module of the model."
                f"{nearest(name, lasts)} It has {', '.join(lasts)}"
            )
        found |= named
    return {path: module for path, module in found.items() if not is_within(path, found)}


def is_within(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path leads into one of the modules, and to none of them itself."""
    return any(path.startswith(f"{module}.") for module in modules)


def _numbers(paths: Iterable[str]) -> set[str]:
    """Return the last names of the entries of lists."""
    return {last for last in (path.rpartition(".")[2] for path in paths) if last.isdecimal()}
