"""Models that read images and that only Python trains: the bits of an ordinary loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from atomtrain.analysis import chain_of
from atomtrain.errors import AnalysisError
from tests.golden.models.test_any_model import check
from tests.support import more_vision_models
from tests.support.any_models import Case

pytestmark = pytest.mark.usefixtures("assumed_times", "fastest_plans")


@pytest.fixture
def _llama4_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend transformers' Llama 4, which asks its language model's output for what that lacks."""
    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)


@pytest.mark.usefixtures("_llama4_runs")
@pytest.mark.parametrize(
    "make", [*more_vision_models.FREE, *more_vision_models.ALIKE], ids=lambda make: make.__name__
)
def test_swapped_is_resident(make: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    check(make(), micro_batches=1, segments=3)


@pytest.mark.usefixtures("_llama4_runs")
def test_several_micro_batches_where_the_head_is_within_the_language_model() -> None:
    torch.manual_seed(0)
    case = more_vision_models.llama4()
    engine = check(case, micro_batches=2, segments=3)
    names = [layer.name for layer in engine.traced.chain.layers]
    assert names[-4:-1] == [f"language_model.model.layers.{index}" for index in range(3)]
    assert names[-1] == "language_model.lm_head"


@pytest.mark.skipif(
    hasattr(MoeCausalLMOutputWithPast, "image_outputs"), reason="transformers is mended"
)
def test_where_transformers_own_forward_fails_its_line_is_told() -> None:
    model, draw = more_vision_models.llama4()
    with pytest.raises(AttributeError, match="image_outputs"):
        model(**draw())
    with pytest.raises(AnalysisError, match=r"modeling_llama4\.py:\d+ .*image_outputs"):
        chain_of(model, draw())
