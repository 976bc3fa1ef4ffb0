"""Closing a session releases all that it holds."""

from __future__ import annotations

from typing import Any

import pytest

from atomtrain.errors import SwarmError
from atomtrain.training.setup.setup import Session


class Closing:
    """Stands for a swarm that cannot be left, and for the engine."""

    closed = False

    def leave(self) -> None:
        raise SwarmError("the network thread does not answer")

    def close(self) -> None:
        self.closed = True


def test_the_engine_is_released_even_if_leaving_the_swarm_fails() -> None:
    session: Any = Session.__new__(Session)
    session.swarm = session.engine = held = Closing()
    with pytest.raises(SwarmError, match="does not answer"):
        session.close()
    assert held.closed
