"""Finds the head of a language model and lets it compute its loss in pieces of the vocabulary.

Logits and their gradient are often the largest workspace of all. In pieces they never exist as a
whole; the result differs in its last bits, so this is done on request only.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import torch
from torch import fx, nn

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts, LayerCost, layer_costs
from atomtrain.analysis.head_graph import split_graph
from atomtrain.errors import AnalysisError, ConfigError

_MOST_PIECES = 64
_WORTH_WHILE = 0.95
"""Twice the pieces are worth while if the head then needs no more than this share."""


@runtime_checkable
class InPieces(Protocol):
    """A module that can compute its loss in pieces of the vocabulary."""

    def in_pieces(self, pieces: int) -> nn.Module:
        """Return such a module on the same parameters; 1 piece is the unsplit loss bit for bit."""
        ...


def split_head(chain: Chain, pieces: int) -> Chain:
    """Return a chain whose last layer computes its loss in pieces of the vocabulary.

    The given chain does not change; parameters and names are shared. 1 piece is the unsplit loss.

    Raises:
        AnalysisError: the last layer shows no linear layer followed by cross-entropy.
        ConfigError: `pieces` is below 1.
    """
    if pieces < 1:
        raise ConfigError(f"the head's pieces must be at least 1, not {pieces}")
    last = chain.layers[-1]
    if isinstance(last.module, InPieces):
        module = last.module.in_pieces(pieces)
    elif isinstance(last.module, fx.GraphModule):
        module = fx.GraphModule(last.module, split_graph(last.module.graph, pieces))
    elif pieces == 1:
        return chain
    else:
        raise AnalysisError(
            f"the head cannot be split: the operations of {type(last.module).__name__} cannot be "
            "seen; let the model compute its own loss, without loss=..., or leave out head_pieces"
        )
    return dataclasses.replace(
        chain, layers=(*chain.layers[:-1], dataclasses.replace(last, module=module))
    )


def split_head_as_needed(
    chain: Chain, costs: ChainCosts, device: torch.device | str = "cpu"
) -> Chain:
    """Return the chain with the fewest pieces that make the head need no more than other layers.

    Fewer, where more would hardly save anything: the weight's gradient is there anyway. Unchanged
    where the head is no such layer.

    Args:
        chain: With the unsplit head.
        costs: Of the chain.
        device: As for `layer_costs`.
    """
    enough_bytes = max((_work_bytes(cost) for cost in costs.layers[:-1]), default=0)
    best, best_bytes = chain, _work_bytes(costs.layers[-1])
    pieces = 2
    while best_bytes > enough_bytes and pieces <= _MOST_PIECES:
        try:
            split = split_head(chain, pieces)
        except AnalysisError:
            return chain
        n_bytes = _work_bytes(_last_cost(split, costs, device))
        if n_bytes > _WORTH_WHILE * best_bytes:
            break
        best, best_bytes = split, n_bytes
        pieces *= 2
    return best


def _last_cost(chain: Chain, costs: ChainCosts, device: torch.device | str) -> LayerCost:
    """Return the costs of the last layer alone."""
    last = chain.layers[-1]
    given = {}
    for name in last.reads:
        shape, dtype, requires_grad, constant = costs.values[name]
        given[name] = constant
        if dtype is not None:
            value = torch.empty(shape, dtype=dtype, device="meta")
            given[name] = value.requires_grad_(requires_grad)
    alone = Chain((last,), tuple(given), chain.loss, chain.names)
    return layer_costs(alone, given, device).layers[0]


def _work_bytes(cost: LayerCost) -> int:
    """Return what a layer needs beside its parameters, gradients and inputs."""
    return max(cost.forward_bytes, cost.graph_bytes, cost.kept_bytes + cost.backward_bytes)
