"""Whether a checkpoint's layers were compiled, for the run that goes on from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atomtrain.engine.calibration.compile_choice import CompileChoice
from atomtrain.errors import CheckpointError
from atomtrain.training.setup.state import compiled_before, compiling_of

CARD: Any = SimpleNamespace(torch_device=torch.device("cuda", 1))
HOST: Any = SimpleNamespace(torch_device=torch.device("cpu"))


def checkpoint(**meta: Any) -> Any:
    return SimpleNamespace(path="step-1", meta=meta)


@pytest.mark.parametrize("compiled", [True, False])
def test_on_such_devices_it_stays_and_on_others_it_is_chosen_anew(compiled: bool) -> None:
    engine: Any = SimpleNamespace(devices=(CARD,), compiling=CompileChoice(compiled, "so"))
    kept = checkpoint(compiling=compiling_of(engine))
    assert compiled_before(kept, [CARD]) is compiled
    assert compiled_before(kept, [HOST]) == "auto"
    assert compiled_before(kept, [CARD, CARD]) == "auto"


def test_a_checkpoint_that_does_not_say_it_leaves_the_choice() -> None:
    assert compiled_before(checkpoint(), [CARD]) == "auto"


@pytest.mark.parametrize("kept", [3, {"compiled": "on", "devices": "1 x cuda"}])
def test_what_makes_no_sense_is_refused(kept: Any) -> None:
    with pytest.raises(CheckpointError, match="does not say whether its layers were compiled"):
        compiled_before(checkpoint(compiling=kept), [CARD])
