"""The model that a plan is asked for: by name or by its Hugging Face configuration, never loaded.

Weights stay on the meta device, so a model of any size costs no memory.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.head import split_head
from atomtrain.errors import AnalysisError, ConfigError, nearest
from atomtrain.models.gpt import GPT
from atomtrain.models.presets import PRESETS, preset
from atomtrain.planning.prospect import Analysis

CONFIG_FILE = "config.json"
_USUAL_CONTEXT = 4096
"""Tokens of a sequence, where the model allows more: what most models are pre-trained with."""
_LONGEST_REASON = 200
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class Subject:
    """A model without weights."""

    name: str
    context_tokens: int
    """Tokens of a sequence."""
    model: nn.Module
    """On the meta device."""
    head_pieces: int | None = None
    """In how many pieces of the vocabulary the head computes its loss; `None` is as it is."""
    _analyses: dict[int, Analysis] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def parameters(self) -> int:
        """Number of parameters, shared weights counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def analyse(self, sequences: int) -> Analysis:
        """Return chain and costs of a micro-batch of so many sequences; each is analysed once.

        Raises:
            AnalysisError: the model is no chain of layers, or its head cannot be split.
        """
        if sequences not in self._analyses:
            shape = (sequences, self.context_tokens)
            ids = torch.zeros(shape, dtype=torch.int64, device="meta")
            example = {"input_ids": ids, "labels": ids}
            traced = chain_of(self.model, example)
            chain = traced.chain
            if self.head_pieces is not None:
                chain = split_head(chain, self.head_pieces)
            self._analyses[sequences] = Analysis(chain, layer_costs(chain, traced.bind(example)))
        return self._analyses[sequences]


def subject(
    name: str, context_tokens: int | None = None, head_pieces: int | None = None
) -> Subject:
    """Return the model that a user named.

    Args:
        name: A preset, or the path of a Hugging Face `config.json` or of a folder with one.
        context_tokens: Tokens of a sequence; `None` is the model's own length, at most 4096 for a
            Hugging Face model.
        head_pieces: See `Subject.head_pieces`.

    Raises:
        ConfigError: no such model, or its sequences are shorter; a package that reads it lacks.
    """
    if context_tokens is not None and context_tokens < 1:
        raise ConfigError(f"--context must be at least 1 token, not {context_tokens}")
    if head_pieces is not None and head_pieces < 1:
        raise ConfigError(f"--head-pieces must be at least 1, not {head_pieces}")
    path = Path(name)
    if name not in PRESETS and (path.exists() or path.suffix == ".json" or "/" in name):
        return _from_hugging_face(path, context_tokens, head_pieces)
    config = preset(name)
    context = context_tokens or config.context
    _check_context(name, context, config.context)
    with torch.device("meta"):
        return Subject(name, context, GPT(config), head_pieces)


def _check_context(name: str, context: int, longest: int) -> None:
    if context > longest:
        raise ConfigError(
            f"{name} takes at most {longest} tokens a sequence, not {context}; choose a smaller "
            "--context"
        )


def _from_hugging_face(path: Path, context_tokens: int | None, head_pieces: int | None) -> Subject:
    file = path / CONFIG_FILE if path.is_dir() else path
    stored = _read(file)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            f"reading {file} needs the package transformers; install it with "
            "pip install 'atomtrain[hf]'"
        ) from None
    kind = stored.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(
            f"{file} has no model_type, so it is no Hugging Face configuration; give the "
            f"config.json of a causal language model, or one of {', '.join(PRESETS)}"
        )
    known = _causal_kinds()
    if kind not in known:
        raise ConfigError(
            f"{file} describes a model of type {kind!r}, which is no causal language model that "
            f"the installed transformers knows.{nearest(kind, known)} Give another configuration"
        )
    try:
        config = AutoConfig.for_model(**stored)
        config.use_cache = False
        longest = _longest(config)
        context = context_tokens or min(longest or _USUAL_CONTEXT, _USUAL_CONTEXT)
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM.from_config
            model = build(config)
    except Exception as error:  # a class of transformers may raise anything
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise AnalysisError(
            f"{file} cannot be made a model ({type(error).__name__}: {reason}); check its values"
        ) from error
    if longest is not None:
        _check_context(str(path), context, longest)
    return Subject(_name_of(file), context, model, head_pieces)


def _read(file: Path) -> dict[str, Any]:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}).{nearest(str(file), PRESETS)} Models: "
            f"{', '.join(PRESETS)}, or the path of a Hugging Face config.json"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{file} is not JSON ({error}); give the config.json of a Hugging Face model"
        ) from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{file} is not a JSON object; give a Hugging Face config.json")
    return stored


def _causal_kinds() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _longest(config: Any) -> int | None:
    """Return the most tokens of a sequence that the model was made for, if it says so."""
    values = (getattr(config, key, None) for key in _CONTEXT_KEYS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _name_of(file: Path) -> str:
    """Return a short name: the folder's, or the file's own."""
    folder = file.absolute().parent.name
    return folder if file.name == CONFIG_FILE and folder else file.stem
