"""Finds the head of a language model and lets it compute its loss in pieces of the vocabulary.

Logits and their gradient are often the largest workspace of all. In pieces they never exist as a
whole; the result differs in its last bits, so this is done on request only.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from atomtrain.analysis.costs.costs import ChainCosts, LayerCost, layer_costs
from atomtrain.analysis.head.head_graph import split_graph, with_lazy_logits
from atomtrain.analysis.head.lazy_logits import LazyLinear
from atomtrain.analysis.layers.chain import Chain
from atomtrain.analysis.layers.direct_calls import function_of
from atomtrain.analysis.layers.graph_layer import GraphLayer, Mode, OtherMode, Template
from atomtrain.analysis.layers.trace import _Joined, _OnOutput
from atomtrain.errors import AnalysisError, ConfigError

Rewrite = Callable[[fx.Graph], fx.Graph]
_MOST_PIECES = 64
_WORTH_WHILE = 0.95
"""Twice the pieces are worth while if the head then needs no more than this share."""


class RewrittenLayer(nn.Module):
    """A layer on the same tensors as another one, with rewritten operations in both modes."""

    def __init__(self, layer: GraphLayer, rewrite: Rewrite) -> None:
        """Rewrite the operations of the exported mode; the other one's may be found out later.

        Raises:
            AnalysisError: as `rewrite` does.
        """
        super().__init__()
        self.layer = layer
        self._rewrite = rewrite
        self._templates: dict[Template, Template] = {}
        self._rewritten(layer.template)

    @property
    def mode(self) -> Mode:
        return self.layer.mode

    @property
    def other(self) -> OtherMode | None:
        """What runs in the other mode, before it is rewritten."""
        return self.layer.other

    def forward(self, *values: Any) -> tuple[Any, ...]:
        layer = copy.copy(self.layer)  # shares the tensors that are in the layer's place just now
        layer.template = self._rewritten(layer.template)
        if layer.other is not None:
            template = self._rewritten(layer.other.template)
            layer.other = layer.other._replace(template=template)
        written: tuple[Any, ...] = layer(*values)
        return written

    def _rewritten(self, template: Template) -> Template:
        if template not in self._templates:
            self._templates[template] = _RewrittenTemplate(template, self._rewrite)
        return self._templates[template]


class _RewrittenTemplate(Template):
    def __init__(self, template: Template, rewrite: Rewrite) -> None:
        self.graph, self.device = rewrite(template.graph), template.device
        self._function = function_of(self.graph)


def split_head(chain: Chain, pieces: int) -> Chain:
    """Return a chain whose last layer computes its loss in pieces of the vocabulary.

    The given chain does not change; parameters and names are shared. 1 piece is the unsplit loss
    bit for bit. A module of the model's own has `in_pieces(pieces)`, which returns such a module on
    the same parameters, or `with_lazy_logits(pieces)`, one with `LazyLogits` in its output.

    Raises:
        AnalysisError: the last layer is not a linear layer followed by cross-entropy. What a loss
            that is a Python function does is known only when it runs, as in `layer_costs`.
        ConfigError: `pieces` is below 1.
    """
    if pieces < 1:
        raise ConfigError(f"the head's pieces must be at least 1, not {pieces}")
    last = chain.layers[-1]
    module = _in_pieces(last.module, pieces)
    return dataclasses.replace(
        chain, layers=(*chain.layers[:-1], dataclasses.replace(last, module=module))
    )


def _in_pieces(module: nn.Module, pieces: int) -> nn.Module:
    if isinstance(module, GraphLayer):
        return RewrittenLayer(module, lambda graph: split_graph(graph, pieces))
    if in_pieces := getattr(module, "in_pieces", None):
        split: nn.Module = in_pieces(pieces)
        return split
    if isinstance(module, fx.GraphModule):
        return fx.GraphModule(module, split_graph(module.graph, pieces))
    if pieces == 1:
        return module
    if isinstance(module, _Joined | _OnOutput):
        # A model's last layer and a loss that is a Python function.
        split = copy.copy(module)
        split._modules = {**module._modules, "module": _with_lazy_logits(module.module, pieces)}
        return split
    raise _cannot(module)


def _with_lazy_logits(module: nn.Module, pieces: int) -> nn.Module:
    if isinstance(module, GraphLayer):
        return RewrittenLayer(module, lambda graph: with_lazy_logits(graph, pieces))
    if isinstance(module, nn.Linear):
        return LazyLinear(module, pieces)
    if with_lazy := getattr(module, "with_lazy_logits", None):
        lazy: nn.Module = with_lazy(pieces)
        return lazy
    raise _cannot(module)


def _cannot(module: nn.Module) -> AnalysisError:
    return AnalysisError(
        f"the head cannot be split: the last layer, {type(module).__name__}, is neither an "
        "nn.Linear nor exported; leave out head_pieces, or make its linear layer the last one"
    )


def split_head_as_needed(
    chain: Chain, costs: ChainCosts, device: torch.device | str = "cpu"
) -> Chain:
    """Return the chain with the fewest pieces that make the head need no more than other layers.

    Fewer, where more would hardly save anything: the weight's gradient is there anyway. Unchanged
    where the head is no such layer.

    Args:
        chain: With the unsplit head.
        device: As for `layer_costs`.
    """
    enough_bytes = max((_work_bytes(cost) for cost in costs.layers[:-1]), default=0)
    best, best_bytes = chain, _work_bytes(costs.layers[-1])
    pieces = 2
    while best_bytes > enough_bytes and pieces <= _MOST_PIECES:
        try:
            split = split_head(chain, pieces)
            n_bytes = _work_bytes(with_head_of(split, costs, device).layers[-1])
        except AnalysisError:
            return chain
        if n_bytes > _WORTH_WHILE * best_bytes:
            break
        best, best_bytes = split, n_bytes
        pieces *= 2
    return best


def with_head_of(chain: Chain, costs: ChainCosts, device: torch.device | str = "cpu") -> ChainCosts:
    """Return the costs of a split chain; only its last layer is measured.

    Args:
        chain: As `split_head` returns it.
        costs: Of the chain before its head was split, or split otherwise.

    Raises:
        AnalysisError: as `layer_costs`.
    """
    last, before = chain.layers[-1], costs.layers[-1]
    given = {}
    for name in last.reads:
        spec = costs.values[name]
        given[name] = spec.constant if spec.dtype is None else spec.empty("meta")
    alone = Chain((last,), tuple(given), chain.loss, chain.names)
    [head] = layer_costs(alone, given, device).layers
    # What depends on the layers before it too.
    head = dataclasses.replace(head, kind=before.kind, buffer_bytes=before.buffer_bytes)
    return costs._replace(layers=(*costs.layers[:-1], head))


def _work_bytes(cost: LayerCost) -> int:
    return max(cost.forward_bytes, cost.graph_bytes, cost.kept_bytes + cost.backward_bytes)
