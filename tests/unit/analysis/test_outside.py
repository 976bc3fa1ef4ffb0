"""What forward keeps outside its modules for its next call is refused, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.errors import AnalysisError
from tests.support.engine_models import square, swap

pytestmark = pytest.mark.usefixtures("assumed_times")
X = torch.ones(2, 4)
COUNT = 0
READY = False
LAST: Tensor | None = None
SEEN: list[Any] = []
STATE: dict[str, Any] = {"calls": 0}


class Numbers:
    calls = 0

    def __init__(self) -> None:
        self.calls = 0


NUMBERS = Numbers()


def _now() -> dict[str, Any]:
    own = {n: v for n, v in globals().items() if n in ("COUNT", "READY", "LAST")}
    held = {"seen": list(SEEN), "state": dict(STATE), "object": NUMBERS.calls}
    return {**own, **held, "class": Numbers.calls}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = _now()
    yield
    assert _now() == before


class Counts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT  # noqa: PLW0603 (what is refused)
        COUNT += 1
        return super().forward(x) * COUNT


def _one_more() -> int:
    STATE["calls"] += 1
    return int(STATE["calls"])


class CountsElsewhere(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self._calls()

    def _calls(self) -> int:
        return _one_more()


class Appends(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(1)
        return super().forward(x) * len(SEEN)


class Remembers(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        global LAST  # noqa: PLW0603 (what is refused)
        y = super().forward(x)
        given = y if LAST is None else y + LAST
        LAST = y.detach()
        return given


class KeepsTable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if "table" not in STATE:
            STATE["table"] = torch.arange(4.0)
        table: Tensor = STATE["table"]
        return super().forward(x) * table


class OfItsClass(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        Numbers.calls += 1
        return super().forward(x) * Numbers.calls


class OfAnObject(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        NUMBERS.calls += 1
        return super().forward(x) * NUMBERS.calls


class OwnObject(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.numbers = Numbers()

    def forward(self, x: Tensor) -> Tensor:
        self.numbers.calls += 1
        return super().forward(x) * self.numbers.calls


class OwnEntry(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.numbers = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.numbers["calls"] += 1
        return super().forward(x) * self.numbers["calls"]


def hooked(inputs: int, outputs: int) -> nn.Module:
    calls = 0

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return out * calls

    model = nn.Linear(inputs, outputs)
    model.register_forward_hook(hook)
    return model


KINDS = [
    (Counts, r"changes 'COUNT' of module .*test_outside"),
    (CountsElsewhere, r"changes 'STATE' of module"),
    (Appends, r"changes 'SEEN' of module"),
    (Remembers, r"changes 'LAST' of module"),
    (KeepsTable, r"changes 'STATE' of module"),
    (OfItsClass, r"changes 'calls' of class .*test_outside\.Numbers"),
    (OfAnObject, r"changes 'calls' of NUMBERS in module"),
    (OwnObject, r"changes 'calls' of numbers of a OwnObject"),
    (hooked, r"changes 'calls' of the variables of hooked\.<locals>\.hook"),
    (OwnEntry, r"changes the attribute 'numbers' of module"),
]


@pytest.mark.parametrize(("make", "message"), KINDS)
@pytest.mark.parametrize("traced", [True, False])
def test_what_is_kept_for_the_next_call_is_refused_in_a_line(
    make: Any, message: str, traced: bool
) -> None:
    """Of a model that is traced, and of layers that run by their own code."""
    model = make(4, 4) if traced else nn.Sequential(make(4, 4), nn.Linear(4, 4))
    if traced and type(model) is nn.Linear:
        model = nn.ModuleDict({"inner": model})
        model.forward = model["inner"].__call__
    with pytest.raises(AnalysisError, match=message) as caught:
        swap(model, X, loss=square)
    assert "\n" not in str(caught.value)


class Prepares(nn.Linear):
    """Its first call does the same as the later ones."""

    def forward(self, x: Tensor) -> Tensor:
        global READY  # noqa: PLW0603 (what is let through)
        READY = True
        return super().forward(x)


def test_what_a_first_call_prepares_is_let_through() -> None:
    model = Prepares(4, 4)
    try:
        with swap(model, X, loss=square) as engine:
            expected = float(square(model(X)).detach())
            assert engine.step([X]) == expected
    finally:
        globals()["READY"] = False


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (int(STATE["calls"]) + 2)


def test_what_is_only_read_and_what_the_loss_keeps_is_let_through() -> None:
    seen = []

    def loss(output: Tensor) -> Tensor:
        seen.append(1)
        return square(output)

    for model in (Reads(4, 4), nn.Sequential(Reads(4, 4), nn.Linear(4, 4))):
        expected = float(square(model(X)).detach())
        with swap(model, X, loss=loss) as engine:
            assert engine.step([X]) == expected
    assert seen
