"""Models that read images: those that are trained, and why others are not."""

from __future__ import annotations

from typing import Any

import pytest

from atomtrain.errors import ConfigError
from atomtrain.models.hugging_face import HuggingFaceConfig, build
from atomtrain.models.image_text import KINDS


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("cohere2_vision", "its processor needs torchvision"),
        ("llama4", "its own forward fails in transformers 5.24"),
        ("mllama", "its processor makes masks"),
        ("paligemma", "its processor writes texts anew"),
        ("idefics2", "of such models these are: llava"),
    ],
)
def test_other_kinds_are_refused_with_the_reason(kind: str, why: str) -> None:
    sizes = HuggingFaceConfig(config={"model_type": kind}, vocabulary=1, context=1, width=1)
    with pytest.raises(ConfigError, match="which reads images and is not trained here") as told:
        build(sizes)
    assert why in str(told.value)
    assert all(known in str(told.value) for known in KINDS)


def test_weights_are_not_divided_for_evaluation() -> None:
    """RWKV does so, and gives them back in training: a layer's weights are never changed."""
    config = {
        "model_type": "rwkv", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 7,
        "attention_hidden_size": 8, "intermediate_size": 8,
    }  # fmt: skip
    sizes = HuggingFaceConfig(config=config, vocabulary=9, context=8, width=8)
    model: Any = build(sizes)
    assert model.config.rescale_every == 0
    assert "rescale_every" not in sizes.config
