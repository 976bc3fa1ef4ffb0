"""Models by name, and those of Hugging Face."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atomtrain.lazy import getter

if TYPE_CHECKING:
    from atomtrain.models.gpt import GPT, GPTOutput
    from atomtrain.models.gpt_config import PRESETS, GPTConfig, preset
    from atomtrain.models.hugging_face import HuggingFaceConfig
    from atomtrain.models.making import Sizes, make_empty, make_model, make_outline

__all__ = [
    "GPT",
    "PRESETS",
    "GPTConfig",
    "GPTOutput",
    "HuggingFaceConfig",
    "Sizes",
    "make_empty",
    "make_model",
    "make_outline",
    "preset",
]

__getattr__ = getter(
    "atomtrain.models",
    {
        "GPT": "atomtrain.models.gpt",
        "GPTConfig": "atomtrain.models.gpt_config",
        "GPTOutput": "atomtrain.models.gpt",
        "HuggingFaceConfig": "atomtrain.models.hugging_face",
        "Sizes": "atomtrain.models.making",
        "make_empty": "atomtrain.models.making",
        "make_model": "atomtrain.models.making",
        "make_outline": "atomtrain.models.making",
        "PRESETS": "atomtrain.models.gpt_config",
        "preset": "atomtrain.models.gpt_config",
    },
)
