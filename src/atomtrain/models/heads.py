"""A head that says of a whole sequence which class it is of, or how good it is.

transformers' classes of decoder models for it (`LlamaForSequenceClassification` and the like) have
one linear layer, `score`, in the place of the language model's head. What it says of the last token
that is not `config.pad_token_id` counts. That a configuration is of such a model, `architectures`
says; its labels are `id2label`. A reward model has one label.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError

HEAD, HEAD_WEIGHT = "score", "score.weight"
_SUFFIX = "ForSequenceClassification"
_MOST_LABELS = 1 << 16
_USUAL_LABELS = 2
"""Of transformers, where a configuration tells none."""
_USUAL_STD = 0.02
_ONE_CLASS = "single_label_classification"


def is_classifier(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    return isinstance(named, list | tuple) and any(str(name).endswith(_SUFFIX) for name in named)


def labels_of(config: Mapping[str, Any]) -> list[str] | None:
    """Return the names of a head's outputs in their order; `None` if the model has no such head.

    Raises:
        ConfigError: `id2label` does not number them, or there are too many.
    """
    if not is_classifier(config):
        return None
    said = config.get("id2label")
    if said is None:
        count = config.get("num_labels", _USUAL_LABELS)
        if not isinstance(count, int) or not 1 <= count <= _MOST_LABELS:
            raise ConfigError(
                f"num_labels must be a whole number from 1 to {_MOST_LABELS}, not {count!r:.40}"
            )
        return _unnamed(count)
    wanted = [str(number) for number in range(len(said))] if isinstance(said, Mapping) else []
    names = [said[number] for number in wanted if number in said]
    if not 1 <= len(names) == len(wanted) <= _MOST_LABELS or not all(
        isinstance(name, str) for name in names
    ):
        raise ConfigError(
            "id2label must give each number from 0 on a name, as transformers saves it; not "
            f"{said!r:.60}"
        )
    return names


def is_embedder(config: Mapping[str, Any]) -> bool:
    """Return whether `architectures` names a model without any head: it says hidden states."""
    named = config.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list | tuple) else []
    return any(n.endswith("Model") and not n.endswith("HeadModel") for n in names)


def without_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a causal language model's configuration as that of the same model without a head.

    Raises:
        ConfigError: transformers has no such model of this type.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    kind = str(config.get("model_type"))
    name = MODEL_MAPPING_NAMES.get(kind)
    if not isinstance(name, str) or not is_embedder({"architectures": [name]}):
        raise ConfigError(
            f"transformers has no model without a head of the type {kind!r}; give another such as "
            "a Llama or a Qwen"
        )
    return {**config, "architectures": [name]}


def numbers_of_labels(labels: Sequence[str]) -> dict[str, int]:
    found = {label: number for number, label in enumerate(labels)}
    if list(labels) == _unnamed(len(labels)):
        found |= {str(number): number for number in range(len(labels))}
    return found


def _unnamed(count: int) -> list[str]:
    return [f"LABEL_{number}" for number in range(count)]


def with_head(
    config: Mapping[str, Any], labels: Sequence[str] | None, padding: int
) -> dict[str, Any]:
    """Return a configuration with a head for these labels.

    Args:
        config: Content of a causal language model's `config.json`, or of one with such a head.
        labels: In their order; `None` of a reward model.
        padding: Token that stands for padding if the configuration names none.

    Raises:
        ConfigError: transformers has no such model of this type, or texts are not of one class.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES,
    )

    kind = str(config.get("model_type"))
    if kind not in CLASSES:
        raise ConfigError(
            f"transformers has no model with a head for classes of the type {kind!r}; give another "
            "such as a Llama or a Qwen"
        )
    problem = config.get("problem_type")
    if labels is not None and len(labels) > 1 and problem not in (None, _ONE_CLASS):
        raise ConfigError(
            f"the model has problem_type {problem!r:.40}, where a text is not of one class; give "
            f"another model, or remove the key from its config.json"
        )
    named = _unnamed(1) if labels is None else labels
    found = {
        **config,
        "architectures": [CLASSES[kind]],
        "id2label": {str(number): label for number, label in enumerate(named)},
        "label2id": {label: number for number, label in enumerate(named)},
        "num_labels": len(named),
        "pad_token_id": padding_of(config, padding),
    }
    inside = config.get("text_config")
    if isinstance(inside, Mapping):  # a head looks there
        found["text_config"] = {**inside, "pad_token_id": found["pad_token_id"]}
    return found


def padding_of(config: Mapping[str, Any], instead: int) -> int:
    """Return the token that a configuration names as padding, or another if it names none."""
    inside = config.get("text_config")
    places = [inside, config] if isinstance(inside, Mapping) else [config]
    vocabulary = next((p["vocab_size"] for p in places if "vocab_size" in p), 0)
    for place in places:
        named = place.get("pad_token_id")
        if isinstance(named, int) and 0 <= named < vocabulary:
            return named
    return instead


def head_of(model: nn.Module) -> nn.Linear | None:
    """Return the head that says something of a whole sequence, `None` if the model has none."""
    found = getattr(model, HEAD, None)
    return found if _is_one(model) and isinstance(found, nn.Linear) else None


def check_head(model: nn.Module, what: str) -> None:
    """Refuse a model that classifies otherwise.

    Raises:
        ConfigError: it does; says how.
    """
    if _is_one(model) and head_of(model) is None:
        raise ConfigError(
            f"{what} describes a {type(model).__name__}, which does not classify by a linear layer "
            f"{HEAD!r} on the last token; give a decoder such as a Llama or a Qwen"
        )


def _is_one(model: nn.Module) -> bool:
    return type(model).__name__.endswith(_SUFFIX)


class NewHead(NamedTuple):
    """What a head begins with: normal numbers, as transformers draws them."""

    shape: tuple[int, ...]
    std: float
    seed: int
    """The run's."""

    @classmethod
    def of(cls, model: nn.Module, seed: int) -> NewHead:
        """Return that of a model, which may be on the meta device."""
        std = getattr(model.config, "initializer_range", _USUAL_STD)
        if not isinstance(std, int | float) or not 0 < std < 1:
            std = _USUAL_STD
        return cls(tuple(model.get_parameter(HEAD_WEIGHT).shape), std, seed)

    def read(self, _: object) -> Tensor:
        """Return the weight, float32."""
        key = hashlib.sha256(f"{self.seed}/{HEAD_WEIGHT}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        return torch.randn(self.shape, generator=generator) * self.std

    def read_into(self, files: object, target: Tensor) -> None:
        target.copy_(self.read(files))
