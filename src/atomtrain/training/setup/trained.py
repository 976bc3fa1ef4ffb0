"""A trained model to use: from a checkpoint, or from the folder of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import nn

from atomtrain.checkpoint import open_checkpoint
from atomtrain.data import Tokenizer, read_tokenizer
from atomtrain.models.hugging_face import CONFIG_FILE, build, read_config
from atomtrain.models.making import make_outline
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.budgets import check_resident
from atomtrain.training.setup.loading import Weights
from atomtrain.training.setup.state import model_of, recipe_of

_USUAL_CONTEXT = 4096


class Trained(NamedTuple):
    """A model in memory, in evaluation mode, on the CPU."""

    model: nn.Module
    tokenizer: Tokenizer
    context: int
    """Tokens that it looks back at most."""
    recipe: Recipe | None
    """How it was trained, if a checkpoint tells."""


def open_trained(path: Path) -> Trained:
    """Return the model of a checkpoint, of a run's folder or of a Hugging Face folder.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
        ConfigError: no configuration that can be read.
        DataError: a folder without weights or tokenizer, or with those of another model.
    """
    if (path / CONFIG_FILE).is_file():
        sizes = read_config(path)
        tokenizer = read_tokenizer(path)
        tokenizer.check_room(sizes.vocabulary, str(path))
        weights = Weights(path, sizes)
        check_resident(weights.outline, str(path))
        model = build(sizes, str(path))
        weights.fill(model)
        return Trained(model.eval(), tokenizer, sizes.context or _USUAL_CONTEXT, None)
    checkpoint = open_checkpoint(path)
    recipe, _ = recipe_of(checkpoint)
    check_resident(make_outline(recipe.sizes), str(path))
    model, tokenizer = model_of(checkpoint)
    return Trained(model, tokenizer, recipe.sizes.context or recipe.context, recipe)
