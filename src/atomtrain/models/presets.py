"""Models by name: the GPT-3 family and small sizes for demonstrations and tests."""

from __future__ import annotations

from atomtrain.errors import ConfigError, nearest
from atomtrain.models.gpt_config import GPTConfig


def _gpt3(layers: int, width: int, heads: int, head_width: int) -> GPTConfig:
    return GPTConfig(layers=layers, width=width, heads=heads, head_width=head_width)


# Brown et al. 2020, table 2.1, as printed: its head widths do not always multiply to the width
# (XL: 24 * 128 against 2048; 13B: 40 * 128 against 5140), so the head width is given as there.
_GPT3 = {
    "gpt3-small": _gpt3(12, 768, 12, 64),
    "gpt3-medium": _gpt3(24, 1024, 16, 64),
    "gpt3-large": _gpt3(24, 1536, 16, 96),
    "gpt3-xl": _gpt3(24, 2048, 24, 128),
    "gpt3-2.7b": _gpt3(32, 2560, 32, 80),
    "gpt3-6.7b": _gpt3(32, 4096, 32, 128),
    "gpt3-13b": _gpt3(40, 5140, 40, 128),
    "gpt3-175b": _gpt3(96, 12288, 96, 128),
}
GPT3 = tuple(_GPT3)
"""The family's names, from small to large."""
PRESETS: dict[str, GPTConfig] = {
    **_GPT3,
    "demo": GPTConfig(layers=8, width=320, heads=5, head_width=64, vocabulary=4096, context=256),
    "tiny": GPTConfig(layers=4, width=64, heads=2, head_width=32, vocabulary=512, context=64),
}


def preset(name: str) -> GPTConfig:
    """Return the sizes of a named model.

    Raises:
        ConfigError: there is no such model; offers the nearest name.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(
            f"there is no model {name!r}.{nearest(name, PRESETS)} Models: {', '.join(PRESETS)}"
        ) from None
