"""What `atom data inspect` counts is what training draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from atomtrain.cli.main import main
from atomtrain.data.sampler import Sampler, SamplerConfig, held_out_batches
from atomtrain.errors import DataError
from atomtrain.models import preset
from atomtrain.training.setup.texts import read_text
from atomtrain.training.tools.preview import inspect
from tests.support.hugging_face_models import write_text


@pytest.mark.parametrize("context", [10, 64, 100_000])
def test_sequences_are_those_of_a_pass_of_training(tmp_path: Path, context: int) -> None:
    data = str(write_text(tmp_path / "text.txt"))
    found = inspect(data, "tiny", context)
    tokens = read_text([data], preset("tiny"), None).material.sources[0].tokens.train  # type: ignore[attr-defined]
    assert found["train_tokens"] == len(tokens)
    config = SamplerConfig(context_tokens=context, sequences=1, seed=0)
    if context < len(tokens):
        assert found["sequences"] == Sampler(tokens, config, "a").draws_per_epoch > 1
    else:
        assert found["sequences"] == 0
        with pytest.raises(DataError, match="shorten the context"):
            Sampler(tokens, config, "a")


def test_a_text_that_is_too_short_is_told_with_the_context_that_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(write_text(tmp_path / "text.txt"))
    tokens = read_text([data], preset("tiny"), None).material.sources[0].tokens  # type: ignore[attr-defined]
    longest = inspect(data, "tiny", 100_000)["longest_context"]
    for part in (tokens.train, tokens.held_out):
        assert next(held_out_batches(part, longest, 1)).inputs.shape == (1, longest)
    with pytest.raises(DataError, match="shorten the context"):
        held_out_batches(tokens.held_out, longest + 1, 1)
    assert main(["data", "inspect", data, "--model", "tiny", "--context", "100000"]) == 0
    assert f"give --context {longest} or less" in capsys.readouterr().out
    assert main(["data", "inspect", data, "--model", "tiny", "--context", str(longest)]) == 0
    assert "or less" not in capsys.readouterr().out
