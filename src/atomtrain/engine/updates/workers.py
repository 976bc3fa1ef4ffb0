"""One optimizer, divided: workers do the same for some of its parameters, with state of their own.

So blocks are updated one by one, each as soon as its gradient is there, and their state can lie in
different places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def worker_for(
    optimizer: torch.optim.Optimizer,
    members: Sequence[nn.Parameter],
    copies: Mapping[int, Tensor] | None = None,
) -> torch.optim.Optimizer | None:
    """Return the same optimizer for some parameters only.

    Its groups name the group of the whole one that they are a part of, as `_group`.

    Args:
        optimizer: That of all parameters.
        members: The parameters.
        copies: By the parameter's `id`, what is updated in its place; `None`: itself.

    Returns:
        `None` if none of them is ever updated.
    """
    keys = {id(p) for p in members}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        inside = [p for p in group["params"] if id(p) in keys]
        if copies is not None:
            inside = [copies[id(p)] for p in inside]
        groups.append({**group, "params": inside, "_group": index})
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    worker = optimizer.__class__.__new__(optimizer.__class__)
    worker.__dict__.update(optimizer.__dict__)
    worker.param_groups = groups
    worker.state = type(optimizer.state)(dict)
    return worker
