"""What the founder of a run says is bounded before who joins builds anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain.training.config.new_recipe import new_recipe
from atomtrain.training.config.options import TrainOptions
from tests.support.hostile_runs import refused
from tests.support.hugging_face_models import LLAMA, tokenizer
from tests.support.mutators import nested
from tests.support.swarm_configs import swarm_config

pytest.importorskip("transformers")
JOINED_S = 20.0
"""With two peers that meet."""
Payload = dict[str, Any]
HF = {"config": LLAMA, "vocabulary": 300, "context": 128, "width": 32, "files": {}}
LARGE = {**LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
         "num_attention_heads": 128, "vocab_size": 128256}  # fmt: skip


@contextmanager
def founded(payload: Payload, elements: tuple[int, ...]) -> Iterator[str]:
    """A run whose founder says this; yields what others join."""
    from atomtrain.swarm import Swarm
    from atomtrain.swarm.membership.config import Manifest

    class Zeros:
        @contextmanager
        def view(self, index: int) -> Iterator[torch.Tensor]:
            yield torch.zeros(elements[index])

    config = swarm_config(run="theirs", listen_host="127.0.0.1")
    swarm = Swarm.found(config, Manifest("theirs", elements, payload), Zeros())
    try:
        yield f"theirs@{swarm.address}" if "@" not in swarm.address else swarm.address
    finally:
        swarm.leave(0.5)


def honest_payload() -> Payload:
    """Return what the founder of a run of the smallest model says."""
    recipe = new_recipe(TrainOptions(model="tiny")).to_json()
    said = {"recipe": recipe, "tokenizer": tokenizer().to_json(), "separator": "<|endoftext|>"}
    made: Payload = json.loads(json.dumps(said))
    return made


def recipe(**values: Any) -> Callable[[Payload], object]:
    return lambda payload: payload["recipe"].update(values)


def sizes(**values: Any) -> Callable[[Payload], object]:
    return lambda payload: payload["recipe"]["sizes"].update(values)


def large(config: dict[str, Any]) -> Callable[[Payload], object]:
    said = {**HF, "config": config, "vocabulary": config["vocab_size"], "width": 16384}
    return recipe(sizes=said)


SAID: dict[str, tuple[Callable[[Payload], object], str]] = {
    "layers": (sizes(layers=10**7), "layers must be at most 4096"),
    "width": (sizes(width=2**31), "cannot be made"),
    "vocabulary": (sizes(vocabulary=10**12), "vocabulary must be a whole number"),
    "a small vocabulary": (sizes(vocabulary=3), "the model has room for 3"),
    "pieces": (sizes(head_pieces=10**9), "head_pieces"),
    "context": (recipe(context=2**40), "a sequence has at most"),
    "sequences": (recipe(sequences=2**40), "a step 1048576 sequences"),
    "NaN as a text": (recipe(learning_rate="nan"), "learning_rate"),
    "objective": (recipe(objective="evil"), "--objective takes"),
    "no recipe": (lambda payload: payload.pop("recipe"), "recipe"),
    "recipe a list": (lambda payload: payload.update(recipe=[1]), "says cannot be used"),
    "separator": (lambda payload: payload.update(separator=None), "no token None"),
    "tokenizer": (lambda payload: payload.update(tokenizer=7), "says cannot be used"),
    "tokenizer nested": (
        lambda payload: payload.update(tokenizer=nested(10**4)), "the tokenizer cannot be read"
    ),
    "a path": (recipe(sizes={**HF, "files": {"../x": ""}}), "'../x'"),
    "kind": (large({**LARGE, "model_type": "evil"}), "of type 'evil'"),
    "experts": (large({**LARGE, "num_experts": 10**9}), "from 0 to 16384"),
    "more memory than is there": (large(LARGE), "of host memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_a_founder_says_is_refused(name: str, text: Path, tmp_path: Path) -> None:
    change, expected = SAID[name]
    payload = honest_payload()
    change(payload)
    with founded(payload, (10,)) as address:
        line = refused(
            tmp_path, "train", "--join", address, "--host", "127.0.0.1", "--data", str(text),
            "--plain", "--threads", "1", "--device", "cpu", most_s=JOINED_S,
        )  # fmt: skip
    assert expected in line
