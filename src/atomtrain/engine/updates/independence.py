"""Whether an optimizer updates each parameter by that parameter's own gradient and state.

Swapped training updates blocks of parameters one by one. An optimizer that looks at all of them, to
clip by the norm of all gradients for instance, would do something else there than in an ordinary
loop, and nothing would say so.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError

_KNOWN = ("torch.optim.", "atomtrain.")
"""Of whose optimizers it is known."""
_SHAPE = (4, 6)
_STEPS = 2


def check_independence(optimizer: torch.optim.Optimizer) -> None:
    """Update two small matrices together and each by itself, as optimizers of others would.

    Where that cannot be tried, because steps need more than gradients or cannot be copied, nothing
    is said.

    Raises:
        ConfigError: it needs a closure, the results differ, or random numbers are drawn: blocks are
            updated in an order of their own, beside the passes of the next step.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} computes the loss again within its step (closure), and "
            "blocks of parameters are updated one by one; use an optimizer that needs gradients "
            "only, such as torch.optim.AdamW"
        )
    if type(optimizer).__module__.startswith(_KNOWN):
        return
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        try:
            together, drawn = _updated(optimizer, group, (0, 1))
            alone = [values for one in (0, 1) for values in _updated(optimizer, group, (one,))[0]]
        except Exception:  # noqa: BLE001 (an optimizer of others may raise anything)
            continue
        if drawn:
            raise ConfigError(
                f"{type(optimizer).__name__} draws random numbers, and blocks of parameters are "
                "updated in an order of their own; use an optimizer that draws none, such as "
                "atomtrain.optimizers.AdamW(parameters, master='split') for 16-bit weights"
            )
        if not all(map(torch.equal, together, alone)):
            raise ConfigError(
                f"{type(optimizer).__name__} updates a parameter otherwise if another one is "
                "beside it, and blocks of parameters are updated one by one; use an optimizer "
                "that looks at one parameter at a time (clip_norm=... clips by all gradients)"
            )


def _updated(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], numbers: tuple[int, ...]
) -> tuple[list[Tensor], bool]:
    """Return what a copy of the optimizer makes of some of the matrices, and if it draws."""
    parameters = group["params"]
    dtype = parameters[0].dtype
    with torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(0)
        draws = [torch.randn(2 + _STEPS, *_SHAPE, generator=generator) for _ in range(2)]
        members = [nn.Parameter(draws[number][0].to(dtype)) for number in numbers]
        everything = [p for each in optimizer.param_groups for p in each["params"]]
        kept: dict[int, Any] = {id(p): p for p in everything}  # not copied
        own = {
            key: copy.deepcopy(value, kept)
            for key, value in vars(optimizer).items()
            if key not in ("param_groups", "state", "step")
        }
        options = {
            key: copy.deepcopy(value, kept) for key, value in group.items() if key != "params"
        }
        probe = type(optimizer).__new__(type(optimizer))
        probe.__dict__.update(own)
        probe.param_groups = [{**options, "params": members}]
        probe.state = type(optimizer.state)(dict)
        before = torch.get_rng_state()
        for step in range(_STEPS):
            for number, member in zip(numbers, members, strict=True):
                # Of unlike sizes: norms of one and of both differ by much.
                member.grad = (10.0**number * draws[number][1 + step]).to(dtype)
            probe.step()
        drawn = not torch.equal(before, torch.get_rng_state())
    return [member.detach() for member in members], drawn
