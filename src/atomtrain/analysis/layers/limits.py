"""Parameters that forward itself holds within limits, by `weight.data.clamp_(-c, c)`: Gemma 3n.

Layers may run several times a step, from copies of their parameters, so none can do that. The
engine does it once before the step, which has the same bits: the first forward of a step does it
before it reads the parameter, and later ones change nothing more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx, nn

from atomtrain.analysis.export.export import Exported

_CLAMP = torch.ops.aten.clamp_.default
_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Limit(NamedTuple):
    """What a parameter is held within before each step."""

    parameter: nn.Parameter
    least: float | None
    most: float | None


def take_limits(exported: Exported) -> list[Limit]:
    """Take out of a graph, in place, what holds parameters within limits before they are read.

    Other writes to parameters stay, and are refused later.
    """
    order = {node: index for index, node in enumerate(exported.graph.nodes)}
    found: list[Limit] = []
    for node in list(exported.graph.nodes):
        if node.target is not _CLAMP:
            continue
        least, most = (*node.args[1:], None, None)[:2]
        least, most = node.kwargs.get("min", least), node.kwargs.get("max", most)
        chain = [node.args[0]]  # from what is written to to what it is a view of
        while chain[-1].target in _VIEWS:
            chain.append(chain[-1].args[0])
        parameter = exported.parameters.get(chain[-1])
        by_data = isinstance(least, fx.Node) or isinstance(most, fx.Node)
        readers = {user for each in chain for user in each.users}.difference(chain)
        if parameter is None or by_data or any(order[user] < order[node] for user in readers):
            continue
        node.replace_all_uses_with(node.args[0])  # it returns what it wrote to
        exported.graph.erase_node(node)
        found.append(Limit(parameter, least, most))
    return found
