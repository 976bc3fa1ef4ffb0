"""How a step is divided so that it fits: by the rule, and with no more analysis than that takes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from atomtrain.analysis import Chain, LayerTime, chain_of, layer_costs
from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.head.head import split_head, with_head_of
from atomtrain.engine.api import swap, swap_fitted
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.options import Options
from atomtrain.models import GPTConfig, make_model, make_outline
from atomtrain.planning import Machine, Request
from atomtrain.planning.search.search import least_budget_bytes
from atomtrain.training.config.new_recipe import new_recipe
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup import fitting
from atomtrain.training.setup.fitting import Fit, Fitting, example_of, find_fit
from atomtrain.training.setup.objectives import objective_of
from atomtrain.training.setup.sources import Source

SIZES, PIECES = (2, 1), (None, 2, 4)
ANY = Machine(
    name="any", load_bytes_per_s=1.0, unload_bytes_per_s=1.0, update_parameters_per_s=1.0,
    device_memory_bytes=1, host_memory_bytes=1,
)  # fmt: skip


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Of a model whose head needs most."""
    monkeypatch.setattr(fitting, "_PIECES", PIECES[1:])
    sizes = GPTConfig(layers=1, width=16, heads=2, head_width=8, vocabulary=900, context=32)
    recipe = new_recipe(TrainOptions(model="tiny", sequences=max(SIZES), context=32))
    return dataclasses.replace(recipe, sizes=sizes)


def fit_of(recipe: Recipe, device_bytes: int) -> Fit:
    """Return how a step is divided for a device."""
    device = open_device("emulated", device_bytes)
    try:
        return find_fit(make_outline(recipe.sizes), recipe, [device], objective_of(recipe))[0]
    finally:
        device.close()


def least_bytes(recipe: Recipe, size: int, pieces: int | None) -> int:
    """Return the least budget with which some plan fits that recomputes everything."""
    objective = objective_of(recipe)
    example = example_of(recipe, size, objective)
    traced = chain_of(make_outline(recipe.sizes), example, objective.loss)
    chain = traced.chain if pieces is None else split_head(traced.chain, pieces)
    costs = layer_costs(chain, traced.bind(example))
    times = {cost.kind: LayerTime(0.0, 0.0) for cost in costs.layers}
    request = Request(
        micro_batches=max(SIZES) // size, boundary="device", device_blocks=(),
        activations="recompute",
    )  # fmt: skip
    return least_budget_bytes(chain, costs, times, ANY, request)


@pytest.fixture
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each chain of a size once, however often a step is divided."""
    whole: dict[int, ChainCosts] = {}
    split: dict[tuple[int, int], ChainCosts] = {}

    def costs_of(chain: Chain, inputs: Any, device: torch.device) -> ChainCosts:
        assert device.type == "cpu"
        size = len(inputs["input_ids"])
        return whole.setdefault(size, whole.get(size) or layer_costs(chain, inputs))

    def costs_in(chain: Chain, before: ChainCosts) -> ChainCosts:
        key = before.values["input_ids"].shape[0], chain.layers[-1].module.pieces  # type: ignore
        return split.setdefault(key, split.get(key) or with_head_of(chain, before))

    monkeypatch.setattr(fitting, "layer_costs", costs_of)
    monkeypatch.setattr(fitting, "with_head_of", costs_in)


@pytest.mark.slow
@pytest.mark.usefixtures("_measured_once")
def test_a_step_is_divided_by_the_rule(recipe: Recipe) -> None:
    """Whole if one sequence fits so, else in the fewest pieces with which one does; then the
    largest micro-batch. Seen at each budget at which something changes, and below all."""
    least = {(s, p): least_bytes(recipe, s, p) for s in SIZES for p in PIECES}
    assert least[1, None] > least[1, 2] > least[1, 4]
    assert least[2, None] > least[1, None]
    for device_bytes in sorted({*least.values(), min(least.values()) - 1}):
        fitting = [key for key, needed in least.items() if needed <= device_bytes]
        pieces = next((p for p in PIECES if (1, p) in fitting), PIECES[-1])
        size = next((s for s in SIZES if (s, pieces) in fitting), SIZES[-1])
        assert fit_of(recipe, device_bytes) == Fit(size, pieces), device_bytes


def test_nothing_is_analysed_in_vain(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pieces: list[int] = []

    def chain_counted(model: Any, example: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(len(example["input_ids"]))
        return chain_of(model, example, *rest, **more)

    def split_counted(chain: Any, count: int) -> Any:
        pieces.append(count)
        return split_head(chain, count)

    monkeypatch.setattr(fitting, "chain_of", chain_counted)
    monkeypatch.setattr(fitting, "split_head", split_counted)
    assert fit_of(recipe, 1 << 30) == Fit(2, None)
    assert (sizes, pieces) == ([2], []), "the largest fits"
    sizes.clear()
    assert fit_of(recipe, 1 << 10) == Fit(1, PIECES[-1])
    assert sizes == [2, 1]
    assert pieces == [2], "in no number of pieces, since its parameters alone do not"


def test_what_was_analysed_for_the_fit_is_not_analysed_again(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = objective_of(recipe)
    source = SimpleNamespace(recipe=recipe, checkpoint=None, text=None)
    fit = Fitting(TrainOptions(model="tiny"), cast(Source, source), objective)
    options = Options(profile=False)

    def trained(opening: Any, *given: Any, options: Options = options) -> list[float]:
        torch.manual_seed(0)
        model = make_model(recipe.sizes)
        with opening(
            model, *given, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), device="emulated",
            loss=objective.loss, options=options,
        ) as engine:  # fmt: skip
            assert engine.planner.options.micro_batches == recipe.sequences // 2
            return [engine.step([fit.example]) for _ in range(3)]

    with monkeypatch.context() as patch:
        for name in ("chain_of", "layer_costs"):
            patch.delattr(f"atomtrain.engine.api.{name}")
        once = trained(swap_fitted, fit)
    assert fit.fit == Fit(2, None)
    again = dataclasses.replace(options, micro_batches=recipe.sequences // 2)
    assert once == trained(swap, fit.example, options=again)
