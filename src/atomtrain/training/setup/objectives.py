"""Which objective a recipe names."""

from __future__ import annotations

from atomtrain.models import HuggingFaceConfig
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.objective import NextToken, Objective, OwnLoss
from atomtrain.training.setup.preference import PreferredAnswer


def objective_of(recipe: Recipe) -> Objective:
    """Return what a recipe's model learns from batches."""
    if recipe.in_pairs:
        return PreferredAnswer(recipe.beta)
    return NextToken() if isinstance(recipe.sizes, HuggingFaceConfig) else OwnLoss()
