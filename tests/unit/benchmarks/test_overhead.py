"""`atom bench overhead`: what it compares is what it says. No time is asserted."""

from __future__ import annotations

import pytest
import torch

from atombench.common import BenchmarkOptions
from atombench.engine import overhead
from atombench.engine.overhead import OverheadSetup
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.shape import ACTIVATIONS

SETUP = OverheadSetup(layers=(1, 3), micro_batches=2, steps=1, warmup_steps=1)


@pytest.mark.slow
def test_every_way_of_a_block_is_measured() -> None:
    threads = torch.get_num_threads()
    result = overhead.run(BenchmarkOptions(), SETUP)
    assert set(result["parts"]) == {"resident", *ACTIVATIONS}
    assert result["host_s_per_block"] == result["parts"]["offload"]
    assert set(result["devices_s_per_block"]) == {"1", "2"}
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_offloaded_blocks_make_again_what_is_cheap() -> None:
    with overhead.opened(SETUP, 3, "offload") as engine:
        plan = engine.plan
        engine.step(overhead._data(SETUP))
    assert plan.remakes
    assert plan.segments == 5
    assert plan.activations[1:-1] == ("offload",) * 3


@pytest.mark.slow
def test_each_of_several_devices_has_as_much_to_do_as_one() -> None:
    with overhead.opened(SETUP, 1, "offload", 2) as engine:
        engine.step(overhead._data(SETUP, 2))
        assert len(engine.devices) == 2
        assert engine.plan.micro_batches == SETUP.micro_batches


def test_models_of_one_depth_compare_nothing() -> None:
    with pytest.raises(ConfigError, match="layers must be two growing numbers"):
        OverheadSetup(layers=(3, 3))
