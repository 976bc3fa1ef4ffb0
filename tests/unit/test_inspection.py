"""What `atom data inspect` counts is what training draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from hugging_face_models import write_text

from atomtrain.data import Sampler, SamplerConfig
from atomtrain.errors import DataError
from atomtrain.models import preset
from atomtrain.training.inspection import inspect
from atomtrain.training.texts import read_text


@pytest.mark.parametrize("context", [10, 64, 100_000])
def test_sequences_are_those_of_a_pass_of_training(tmp_path: Path, context: int) -> None:
    data = str(write_text(tmp_path / "text.txt"))
    found = inspect(data, "tiny", context)
    tokens = read_text(data, preset("tiny"), None).material.tokens.train  # type: ignore[attr-defined]
    assert found["train_tokens"] == len(tokens)
    config = SamplerConfig(context_tokens=context, sequences=1, seed=0)
    if context < len(tokens):
        assert found["sequences"] == Sampler(tokens, config, "a").windows_per_epoch > 1
    else:
        assert found["sequences"] == 0
        with pytest.raises(DataError, match="shorten the context"):
            Sampler(tokens, config, "a")
