"""`compile="auto"` trains to the bits of the way that it takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atomtrain.engine.calibration.compile_choice import CompileChoice
from atomtrain.engine.execution.compiled import CACHE_VARIABLE, CompiledLayer
from atomtrain.errors import ConfigError
from tests.support.compile_times import CompileTimes
from tests.support.swapped import gpt, swap, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.fixture
def times(
    assumed_times: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[CompileTimes]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "compiled"))
    torch._dynamo.reset()
    given = CompileTimes()
    given.install(monkeypatch)
    yield given
    torch._dynamo.reset()


def trained(compile: Any, **options: Any) -> tuple[dict[str, Tensor], CompileChoice]:
    torch.manual_seed(0)
    model, steps = gpt(tied=False), token_batches(2, steps=2)
    with swap(model, steps[0][0], micro_batches=2, compile=compile, **options) as engine:
        for step in steps:
            engine.step(step)
        layers = [isinstance(layer, CompiledLayer) for layer in engine.planner.chain.layers]
        assert any(layers) is engine.compiling.compiled
        state = {name: value.clone() for name, value in engine.state_dict().items()}
    return state, engine.compiling


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(value.equal(other[name]) for name, value in one.items())


@pytest.mark.parametrize(("ratio", "taken"), [(1.2, True), (1.04, False)])
def test_the_choice_has_the_bits_of_that_choice(
    times: CompileTimes, ratio: float, taken: bool
) -> None:
    expected = {way: trained(way)[0] for way in (True, False)}
    assert not equal(expected[True], expected[False]), "else this would show nothing"
    times.speed_ratio = ratio
    found, choice = trained("auto")
    assert choice.compiled is taken
    assert choice.why.startswith(f"{ratio:.2f} times as fast in the profile")
    assert equal(found, expected[taken])
    # Other times later: what was found counts, and what is not worth it is not compiled again.
    times.speed_ratio, times.compiled = 2.24 - ratio, 0
    found, again = trained("auto")
    assert again == choice
    assert times.compiled == taken
    assert equal(found, expected[taken])


def test_deterministic_runs_are_those_of_layers_as_they_are(times: CompileTimes) -> None:
    times.speed_ratio = 9.0
    found, choice = trained("auto", deterministic=True)
    assert not choice.compiled
    assert times.compiled == 0
    assert equal(found, trained(False, deterministic=True)[0])


def test_a_compiler_that_fails_leaves_layers_as_they_are(
    times: CompileTimes, caplog: pytest.LogCaptureFixture
) -> None:
    def backend(*_: Any) -> Any:
        raise RuntimeError("no Python.h\nand much more")

    times.backend = backend
    with caplog.at_level(logging.WARNING, "atomtrain"):
        found, choice = trained("auto")
    assert not choice.compiled
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == str(choice)
    assert "no Python.h" in line
    assert "\n" not in line
    assert equal(found, trained(False)[0])
    times.compiled = 0
    again = trained("auto")[1]
    assert "no Python.h" in again.why
    assert times.compiled == 0
    with pytest.raises(ConfigError, match=r"no Python\.h"):
        trained(True)


def test_without_a_compiler_auto_goes_on_and_on_does_not(
    times: CompileTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "there is no no-such-compiler" in trained("auto")[1].why
    with pytest.raises(ConfigError, match="there is no no-such-compiler"):
        trained(True)
    assert times.compiled == 0
