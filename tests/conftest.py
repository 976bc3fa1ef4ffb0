"""What all tests of the engine share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT

if importlib.util.find_spec("hypothesis") is not None:  # tests of GPUs do without
    from hypothesis import HealthCheck, settings

    # No deadline that a busy machine might miss, and the same examples each time.
    settings.register_profile(
        "atom", deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    # With `--hypothesis-profile other --hypothesis-seed N`: other examples for each N.
    settings.register_profile("other", settings.get_profile("atom"), derandomize=False)
    settings.load_profile("atom")
# Processes that tests start find `tests.support` as tests do.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` looks into its folder only: machines with a GPU may lack what other tests import."""
    apart = collection_path.is_dir() and collection_path.parent == Path(__file__).parent
    if apart and collection_path.name != "gpu" and config.option.markexpr == "gpu":
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of network namespaces run where somebody who may make them asks for them only.

    Files of unit tests that are all quick come last, and fill up what is left at the end.
    """
    unit = Path(__file__).with_name("unit")
    quick = {item.path for item in items if unit in item.path.parents}
    quick -= {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path in quick)
    why = ""
    if os.geteuid() != 0:
        why = "needs root (network namespaces)"
    elif os.environ.get("CI"):
        why = "needs network namespaces, which CI is not given"
    for item in items:
        if why and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session", autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measure this machine once for all tests, in whichever process, and leave the user's cache
    alone. It is not measured again because the tests beside leave the processor for a moment."""
    base = tmp_path_factory.getbasetemp()
    several = "PYTEST_XDIST_WORKER" in os.environ
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str((base.parent if several else base) / "cache"))
        patch.setattr("atomtrain.engine.calibration.profiling.crowded_now", lambda: 1.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _plain_processor() -> Iterator[None]:
    """Let `--precision auto` be float32 in this process, whatever the processor can do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atomtrain.engine.devices.native._CPUINFO", Path(os.devnull))
        yield


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A run in this process takes all cores; later tests would wait for threads that wait."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _costs_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure what equal layers cost once, but where that is what is tested, and on GPUs."""
    if not {"analysis", "gpu"} & set(request.path.parts):
        from tests.support.known_costs import measured_once

        monkeypatch.setattr("atomtrain.analysis.costs.costs._measure", measured_once)


@pytest.fixture
def assumed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume the rates of layers and host, so that plans are quickly made and always the same."""
    from atomtrain.engine.calibration.machines import assumed_machine
    from atomtrain.engine.calibration.profiling import Profile
    from tests.support.engine_models import assumed_times

    def assumed_profile(device: Any, chain: Any, costs: Any, *_: Any, **__: Any) -> Profile:
        return Profile(assumed_machine(device), assumed_times(chain, costs))

    monkeypatch.setattr("atomtrain.engine.api.take_profile", assumed_profile)
    monkeypatch.setattr("atomtrain.engine.api.measured_updates", lambda model, *_, **__: model)
    monkeypatch.setattr(
        "atomtrain.engine.calibration.machines._tried_update_rate", lambda _threads: 1e9
    )


@pytest.fixture
def no_search_for_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the largest micro-batch and the whole head, which do fit: the planner says so if not.

    The search may analyse the model with several sizes.
    """
    from atomtrain.training.setup import fitting

    def find_fit(model: Any, recipe: Any, devices: Any, objective: Any, *more: Any) -> Any:
        _, micro_batch = more
        sizes = fitting._sizes(recipe, objective.together, len(devices))
        return fitting.Fit(micro_batch or sizes[0], None), None

    monkeypatch.setattr(fitting, "find_fit", find_fit)
