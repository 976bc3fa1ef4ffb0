"""While a model is made nothing is fetched, and all is as before afterwards."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atomtrain.errors import CheckpointError, ConfigError
from atomtrain.models.confined import check_made, checked_config, confined, numbers_of
from atomtrain.models.gpt_config import GPTConfig
from atomtrain.models.hugging_face import HuggingFaceConfig, build, read_config
from atomtrain.models.lora_config import LoraConfig
from atomtrain.training.config.new_recipe import new_recipe
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.sources import _base_of
from tests.support.hugging_face_models import LLAMA, write_model

pytest.importorskip("transformers")


def test_nothing_is_fetched_inside_and_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    mine: Any = object()
    monkeypatch.setitem(sys.modules, "kernels", mine)
    fetch: Any = hub_kernels.get_kernel
    with confined():
        assert constants.is_offline_mode()
        with pytest.raises(ImportError):
            import kernels  # noqa: F401
        with pytest.raises(FileNotFoundError, match="no code comes from a model"):
            hub_kernels.get_kernel("org/name")
    assert not constants.is_offline_mode()
    assert sys.modules["kernels"] is mine
    assert hub_kernels.get_kernel is fetch
    monkeypatch.delitem(sys.modules, "kernels")
    with pytest.raises(RuntimeError), confined():
        raise RuntimeError
    assert "kernels" not in sys.modules


def test_models_are_made_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants
    from transformers import LlamaForCausalLM

    write_model(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    seen = []
    original: Any = LlamaForCausalLM.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        seen.append((constants.is_offline_mode(), sys.modules.get("kernels", ...)))
        original(self, *arguments, **named)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", init)
    build(read_config(tmp_path))
    assert seen == [(True, None)]


def test_an_object_that_asks_for_others_code_is_refused() -> None:
    """Whichever way it came to ask for it."""
    from transformers import AutoConfig

    made: Any = AutoConfig.for_model(**LLAMA)
    check_made(made, "it")
    made.part = AutoConfig.for_model(**LLAMA)
    made.part._attn_implementation_internal = "org/name"
    with pytest.raises(ConfigError, match="not transformers' own"):
        check_made(made, "it")


def test_what_decides_a_model_stays() -> None:
    opt = {"model_type": "opt", "_remove_final_layer_norm": True, "layers": [1, {"dtype": None}]}
    assert checked_config({**opt, "_name_or_path": "x", "auto_map": {"A": "b"}}, "it") == opt
    assert checked_config(LLAMA, "it") == LLAMA


SIZES: dict[str, Any] = {"config": LLAMA, "vocabulary": 300, "context": 128, "width": 32}


@pytest.mark.parametrize(
    "wrong",
    [
        {"config": []}, {"files": {"../x": ""}}, {"files": {"tokenizer_config.json": 1}},
        {"vocabulary": -1}, {"vocabulary": "x"}, {"width": 1 << 40}, {"context": 0.5},
        {"config": {**LLAMA, "num_hidden_layers": True}},
        {"config": {**LLAMA, "num_hidden_layers": 5000}},
        {"config": {**LLAMA, "vision_config": {"window_size": 16385}}},
        {"config": {**LLAMA, "head_dim": [8, -8]}},
    ],
)  # fmt: skip
def test_sizes_of_a_stranger_are_bounded(wrong: dict[str, Any]) -> None:
    HuggingFaceConfig(**SIZES)
    with pytest.raises(ConfigError):
        HuggingFaceConfig(**{**SIZES, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"context": 0}, {"context": "x"}, {"sequences": -1}, {"steps": 1.5}, {"evaluate_every": 0},
        {"learning_rate": float("nan")}, {"learning_rate": "x"}, {"clip_norm": -1.0},
        {"seed": 1 << 70}, {"sizes": {"layers": 10**7, "width": 8, "heads": 1, "head_width": 8}},
        {"sizes": {"layers": "x", "width": 8, "heads": 1, "head_width": 8}},
    ],
)  # fmt: skip
def test_recipes_of_a_stranger_are_bounded(wrong: dict[str, Any]) -> None:
    said = json.loads(json.dumps(new_recipe(TrainOptions(model="tiny")).to_json()))
    Recipe.from_json(said)
    with pytest.raises(CheckpointError, match="not a recipe of atomtrain"):
        Recipe.from_json({**said, **wrong})


def test_the_deepest_gpt_is_bounded() -> None:
    with pytest.raises(ConfigError, match="layers must be at most 4096"):
        GPTConfig(layers=4097, width=8, heads=1, head_width=8)


def test_a_checkpoint_names_no_model_of_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fetched(*_: object, **__: object) -> None:
        raise AssertionError("a hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    recipe = new_recipe(TrainOptions(model="tiny"))
    adapted = dataclasses.replace(recipe, sizes=HuggingFaceConfig(**SIZES), lora=LoraConfig(r=2))
    with pytest.raises(ConfigError, match="evil-org/evil, which is not there any more"):
        _base_of(adapted, None, "evil-org/evil")


def test_numbers_that_json_does_not_have_are_kept() -> None:
    limits = [0.0, {"__float__": "Infinity"}, {"__float__": "-Infinity"}]
    checked = checked_config({"part": {"limits": limits}}, "c")
    assert checked == {"part": {"limits": limits}}  # as it is stored, since it goes on as JSON
    assert numbers_of(checked) == {"part": {"limits": [0.0, float("inf"), float("-inf")]}}
    # Anything else under that name is private, as before.
    for other in ([], {}, 1, "Inf", None):
        assert checked_config({"a": {"__float__": other}}, "c") == {"a": {}}
    assert checked_config({"a": {"__float__": "NaN", "b": 1}}, "c") == {"a": {"b": 1}}
