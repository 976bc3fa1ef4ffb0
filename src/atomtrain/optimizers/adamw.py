"""AdamW for the host: moments in float32, bfloat16 or 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from atomtrain.optimizers import compiled, masters, moments
from atomtrain.optimizers.base import HostOptimizer, check_adamw_group
from atomtrain.optimizers.compiled import Paths
from atomtrain.optimizers.moments import check_state, new_state, part_bytes

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class AdamW(HostOptimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) at memory bandwidth.

    With `state="float32"` it equals `torch.optim.AdamW(fused=True)` bit for bit and has the same
    state. The narrower formats (`atomtrain.optimizers.moments`) save 4 or 6 bytes a parameter; they
    are rounded at random by a pure function of seed, step and position, so a run gives the same
    bits whatever the number of threads, and goes on with the same bits when it is resumed.

    Parameters of 16 bits have exact masters (`HostOptimizer`).
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        state: str = "float32",
        seed: int = 0,
        master: str = "float32",
    ) -> None:
        """Make the optimizer; each argument but the first is the default of parameter groups.

        Args:
            params: Contiguous parameters of float32, bfloat16 or float16 on the CPU, or groups.
            lr: Learning rate; at least 0.
            betas: Decay of the first and the second moment a step; at least 0, below 1.
            eps: Added to the denominator; above 0.
            weight_decay: Decoupled: `lr * weight_decay` of a parameter is taken off each step.
            state: Format of the moments: `float32`, `bfloat16` or `int8`.
            seed: Of the random rounding; 0 to 2^63 - 1. Unused with `float32`.
            master: Format of the masters of bfloat16 parameters: `float32` or `split`, of 4 or 2
                bytes; both give the same bits. Float32 parameters need none.

        Raises:
            ConfigError: a number out of range, an unknown format, or a parameter that cannot be
                updated in place here.
        """
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state": state,
            "seed": seed,
            "master": master,
        }
        super().__init__(params, defaults)

    def _check(self, group: dict[str, Any]) -> None:
        check_adamw_group(group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        PATHS.update(parameter, gradient, self.state[parameter], group, self.scaling)

    def _parts(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, int]:
        return part_bytes(parameter, group["state"])

    def _scratch_bytes(self, parameter: Tensor, group: dict[str, Any], *, on_gpu: bool) -> int:
        return scratch_bytes(parameter, group, on_gpu=on_gpu)


def scratch_bytes(parameter: Tensor, group: dict[str, Any], *, on_gpu: bool) -> int:
    """Return the scratch that updating a parameter needs: none by the compiled core."""
    if not on_gpu and PATHS.compiled_for(parameter, parameter.dtype, group):
        return 0
    return moments.scratch_bytes(parameter, group, on_gpu=on_gpu)


def _prepare(state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    if parameter.dtype in masters.STREAMS:
        masters.stored_master(state, parameter, group["master"])
    if "step" not in state:
        state.update(new_state(parameter, group["state"]))
    check_state(state, parameter, group["state"])
    return {}


PATHS = Paths(
    _prepare,
    moments.adamw_update,
    compiled.adamw_update,
    kind="state",
    fused=lambda group: group["state"] == "float32",
)
"""Also of what `Muon` leaves to AdamW."""
