"""Whether `auto` compiles: by device, options and times, which are given here."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atomtrain.analysis import LayerTime
from atomtrain.engine.calibration.compile_choice import (
    LEAST_SPEED_RATIO,
    CompileChoice,
    Profiled,
    choice_of,
    faster_of,
)
from atomtrain.engine.calibration.profile_cache import ProfileCache, machine_key
from atomtrain.engine.calibration.profiling import Profile
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.execution.compiled import compiled
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError, DeviceMemoryError, PlanError
from tests.unit.analysis.test_profile import parts, small_gpt

CARD: Any = SimpleNamespace(torch_device=torch.device("cuda", 0), name="a card")
HOST: Any = SimpleNamespace(torch_device=torch.device("cpu"), name="a host")
PARTS = functools.cache(lambda layers: parts(small_gpt(layers)))


@pytest.fixture(autouse=True)
def _there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # any program: none is run here


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice(1 << 24, 1e9)
    yield opened
    opened.close()


def profiled(seconds: float, *, by_compiler: bool = False) -> Profiled:
    """Return a model whose layers take so long forward, and twice that with backward."""
    chain, costs, _ = PARTS(3)
    times = {cost.kind: LayerTime(seconds, 2 * seconds) for cost in costs.layers}
    if by_compiler:
        chain = compiled(chain, costs, torch.device("cpu"))
    return Profiled(chain, costs, Profile(None, times))  # type: ignore[arg-type]


class Compiler:
    """Compiles to layers that take so long; counts how often."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.runs = seconds, 0

    def __call__(self) -> Profiled:
        self.runs += 1
        return profiled(self.seconds, by_compiler=True)


def chosen(devices: list[Any], *, images_grow: bool = False, **given: Any) -> CompileChoice | None:
    options = Options(**given)
    return choice_of(
        options.compile,
        devices,
        deterministic=options.deterministic,
        images_grow=images_grow,
        profile=options.profile,
    )


def failing(error: BaseException) -> Callable[[], Profiled]:
    def run() -> Profiled:
        raise error

    return run


def test_auto_tries_on_one_gpu_and_nowhere_else(device: Any) -> None:
    assert chosen([CARD]) is None
    for other in (HOST, device):
        choice = chosen([other])
        assert str(choice) == "not compiled: auto compiles for GPUs only"


@pytest.mark.parametrize(
    ("options", "devices", "why"),
    [
        ({"deterministic": True}, [CARD], "deterministic"),
        ({"profile": False}, [CARD], "profile"),
        ({"images_grow": True}, [CARD], "images may become larger"),
        ({}, [CARD, CARD], "one GPU only"),
    ],
)
def test_where_auto_leaves_layers_as_they_are(
    options: dict[str, Any], devices: list[Any], why: str
) -> None:
    choice = chosen(devices, **options)
    assert choice is not None
    assert not choice.compiled
    assert why in choice.why
    assert chosen(devices, compile=True, **options) == CompileChoice(True, "as chosen")


@pytest.mark.parametrize("device", [CARD, HOST])
@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_said_counts_on_any_device(device: Any, wanted: bool) -> None:
    assert chosen([device], compile=wanted) == CompileChoice(wanted, "as chosen")


@pytest.mark.parametrize("given", ["on", 1, None, "always"])
def test_what_does_not_say_whether_to_compile_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"compile must be 'auto', True \(on\) or False \(off\)"):
        Options(compile=given)


@pytest.mark.parametrize(
    ("ratio", "taken", "line"),
    [
        (1.23, True, "compiled: 1.23 times as fast in the profile"),
        (LEAST_SPEED_RATIO + 1e-9, True, "compiled: 1.05 times as fast in the profile"),
        (1.04, False, "not compiled: 1.04 times as fast in the profile, less than 1.05"),
        (0.5, False, "not compiled: 0.50 times as fast in the profile, less than 1.05"),
    ],
)
def test_more_than_noise_decides(
    ratio: float, taken: bool, line: str, device: Any, tmp_path: Path
) -> None:
    plain, compiler = profiled(1.0), Compiler(1.0 / ratio)
    found, choice = faster_of(plain, compiler, device, tmp_path)
    assert (choice.compiled, str(choice)) == (taken, line)
    assert (found is plain) is not taken
    assert compiler.runs == 1


def test_later_runs_choose_the_same_whatever_is_measured(device: Any, tmp_path: Path) -> None:
    """And what is not worth it is not compiled again."""
    plain = profiled(1.0)
    _, first = faster_of(plain, Compiler(0.5), device, tmp_path)
    again = Compiler(2.0)
    found, choice = faster_of(plain, again, device, tmp_path)
    assert choice == first == CompileChoice(True, "2.00 times as fast in the profile")
    assert found.profile.times != plain.profile.times
    assert again.runs == 1
    cache = ProfileCache(tmp_path, machine_key(device))
    cache.forget()
    cache.save()
    _, first = faster_of(plain, Compiler(2.0), device, tmp_path)
    again = Compiler(0.5)
    found, choice = faster_of(plain, again, device, tmp_path)
    assert choice == first
    assert not choice.compiled
    assert found is plain
    assert again.runs == 0


def test_another_model_is_measured_for_itself(device: Any, tmp_path: Path) -> None:
    faster_of(profiled(1.0), Compiler(0.5), device, tmp_path)
    chain, costs, _ = PARTS(5)
    deeper = Profiled(chain, costs, profiled(1.0).profile)
    compiler = Compiler(2.0)
    assert not faster_of(deeper, compiler, device, tmp_path)[1].compiled
    assert compiler.runs == 1


@pytest.mark.parametrize(
    ("error", "why", "kept"),
    [
        (ConfigError("layer 'x' cannot be compiled"), "layer 'x' cannot be compiled", True),
        (PlanError("layer 'x' takes 2 GiB; raise it"), "layer 'x' takes 2 GiB; raise it", False),
        (DeviceMemoryError("the GPU has no 2 GiB left"), "the GPU has no 2 GiB left", False),
        (torch.OutOfMemoryError("no 2 GiB."), "OutOfMemoryError: no 2 GiB", False),
        (RuntimeError("no ptxas.\nand much more"), "RuntimeError: no ptxas", True),
    ],
)
def test_a_compiler_that_fails_costs_one_line_and_is_not_tried_at_each_start(
    error: Exception, why: str, kept: bool, device: Any, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    plain = profiled(1.0)
    with caplog.at_level(logging.WARNING):
        found, choice = faster_of(plain, failing(error), device, tmp_path)
    assert (found, choice) == (plain, CompileChoice(False, why))
    assert [record.getMessage() for record in caplog.records] == [f"not compiled: {why}"]
    compiler = Compiler(0.5)
    _, again = faster_of(plain, compiler, device, tmp_path)
    assert again.compiled is not kept  # of memory there may be more the next time
    if kept:
        assert again.why == f"{why} (at an earlier start; --profile-again tries anew)"
        assert compiler.runs == 0
        cache = ProfileCache(tmp_path, machine_key(device))
        cache.forget()
        cache.save()
        assert faster_of(plain, compiler, device, tmp_path)[1].compiled
    assert compiler.runs == 1


def test_a_missing_compiler_is_looked_for_at_each_start(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compiler = profiled(1.0), Compiler(0.5)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "there is no no-such-compiler" in faster_of(plain, compiler, device, tmp_path)[1].why
    assert compiler.runs == 0
    monkeypatch.setenv("CXX", sys.executable)
    assert faster_of(plain, compiler, device, tmp_path)[1].compiled


def test_who_interrupts_a_compiler_is_heard(device: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        faster_of(profiled(1.0), failing(KeyboardInterrupt()), device, tmp_path)


def test_a_model_of_which_nothing_can_be_compiled(device: Any, tmp_path: Path) -> None:
    plain = profiled(1.0)
    found, choice = faster_of(plain, lambda: profiled(0.1), device, tmp_path)
    assert found is plain
    assert choice == CompileChoice(False, "no layer of the model can be")


def test_a_damaged_ratio_is_measured_again(device: Any, tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path, machine_key(device))
    cache.put_speed_ratio("x", -1.0)
    cache.save()
    assert ProfileCache(tmp_path, machine_key(device)).speed_ratio("x") is None
    cache.put_compile_failure("x", "no ptxas")
    cache.save()
    assert ProfileCache(tmp_path, machine_key(device)).compile_failure("x") == "no ptxas"
    assert ProfileCache(tmp_path, machine_key(device)).speed_ratio("x") is None


def test_a_ratio_goes_with_the_times_that_it_came_from(device: Any, tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path, machine_key(device))
    cache.put_speed_ratio("x", 2.0)
    cache.forget(0.5)
    assert cache.speed_ratio("x") is None


def test_the_help_says_by_how_much() -> None:
    (field,) = (field for field in dataclasses.fields(Options) if field.name == "compile")
    assert f"at least {LEAST_SPEED_RATIO - 1:.0%}" in field.metadata["help"]
