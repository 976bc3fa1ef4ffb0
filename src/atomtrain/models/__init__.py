"""Models by name."""

from atomtrain.models.gpt import GPT, GPTConfig, GPTOutput
from atomtrain.models.presets import PRESETS, preset

__all__ = ["GPT", "PRESETS", "GPTConfig", "GPTOutput", "preset"]
