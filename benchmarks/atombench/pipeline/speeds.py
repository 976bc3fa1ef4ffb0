"""How fast the peers of a benchmark compute, as they measured it of themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from atombench.network.model import ModelSetup


class Speeds(NamedTuple):
    """What the peers measured of themselves, all computing at once; the slowest counts."""

    sizes: Mapping[int, Mapping[str, Any]]
    """As `GlooPeer.speeds` returns them, by sequences in a micro-batch."""
    update_parameters_per_s: float

    @classmethod
    def of(cls, replies: Sequence[Mapping[str, Any]]) -> Speeds:
        """Put the peers' answers together."""
        sizes = {
            int(size): merged([reply["sizes"][size] for reply in replies], max)
            for size in replies[0]["sizes"]
        }
        return cls(sizes, min(reply["update_parameters_per_s"] for reply in replies))

    def tokens_per_s(self, setup: ModelSetup) -> float:
        """Return one peer's rate of forward and backward over the whole model, at its best."""
        return max(self._rates(setup).values())

    def best_size(self, setup: ModelSetup) -> int:
        """Return the sequences in a micro-batch at which that rate is reached."""
        rates = self._rates(setup)
        return max(rates, key=lambda size: rates[size])

    def _rates(self, setup: ModelSetup) -> dict[int, float]:
        rates = {}
        for size, kinds in self.sizes.items():
            layers = [*layer_kinds(setup)]
            took_s = sum(kinds[k]["forward_s"] + kinds[k]["backward_s"] for k in layers)
            rates[size] = size * setup.sequence_tokens / took_s
        return rates


def layer_kinds(setup: ModelSetup) -> list[str]:
    """Return the kinds of all layers, in order: `embedding`, `block`, `head`."""
    return ["embedding", *["block"] * setup.layers, "head"]


def merged(values: Sequence[Any], choose: Callable[[Sequence[Any]], Any]) -> Any:
    """Return what `choose` (`min`, `max`) takes of each number in equal trees of mappings."""
    if isinstance(values[0], Mapping):
        return {key: merged([value[key] for value in values], choose) for key in values[0]}
    return choose(values)
