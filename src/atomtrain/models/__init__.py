"""Models by name, and those of Hugging Face."""

from atomtrain.models.gpt import GPT, GPTConfig, GPTOutput
from atomtrain.models.hugging_face import HuggingFaceConfig
from atomtrain.models.making import Sizes, make_empty, make_model, make_outline
from atomtrain.models.presets import PRESETS, preset

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
