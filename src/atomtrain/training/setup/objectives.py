"""Which objective a recipe names."""

from __future__ import annotations

from atomtrain.models import HuggingFaceConfig
from atomtrain.training.config.new_recipe import check_head_of
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.classification import Classification
from atomtrain.training.setup.objective import NextToken, Objective, OwnLoss
from atomtrain.training.setup.preference import (
    DirectPreference,
    JudgedAnswer,
    OddsRatio,
    PreferredAnswer,
    RewardModel,
    SimplePreference,
)


def objective_of(recipe: Recipe) -> Objective:
    """Return what a recipe's model learns from batches.

    Raises:
        ConfigError: its head does not say that.
    """
    check_head_of(recipe.objective, getattr(recipe.sizes, "labels", None), recipe.model)
    if recipe.objective == "classify":
        return Classification()
    if recipe.in_pairs:
        return preference_of(recipe)
    return NextToken() if isinstance(recipe.sizes, HuggingFaceConfig) else OwnLoss()


def preference_of(recipe: Recipe) -> PreferredAnswer:
    """Return the loss of a recipe that learns from pairs of answers."""
    if recipe.objective == "reward":
        return RewardModel()
    if recipe.objective == "kto":
        return JudgedAnswer(recipe.beta)
    if recipe.has_reference:
        return DirectPreference(recipe.beta)
    if recipe.objective == "orpo":
        return OddsRatio(recipe.beta)
    return SimplePreference(recipe.beta, recipe.gamma)
