"""Where gradients lie, and in which type they add up: that of their parameters, or float32."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from atomtrain.analysis.chain import Chain
from atomtrain.errors import ConfigError


def with_gradients_in(chain: Chain, gradient_dtype: str | None) -> Chain:
    """Return the chain with gradients that add up in float32, if that is asked for.

    Raises:
        ConfigError: a trainable parameter is neither float32 nor of 16 bits, some are and some are
            not of 16 bits, or this torch cannot.
    """
    if gradient_dtype is None:
        return chain
    sizes = {p.element_size() for p in chain.parameters if p.requires_grad}
    if sizes == {4}:
        return chain  # they do already
    if sizes != {2}:
        raise ConfigError(
            "gradient_dtype='float32' takes models whose trainable parameters are all of 16 or all "
            "of 32 bits; convert the model with model.bfloat16(), or choose precision='bf16'"
        )
    if not hasattr(torch.empty(0), "grad_dtype"):
        raise ConfigError(
            f"gradient_dtype='float32' needs torch 2.10 or newer, this is {torch.__version__}"
        )
    return dataclasses.replace(chain, gradient_factor=2)


def accept_wide(tensor: Tensor, factor: int) -> None:
    """Let autograd add a tensor's gradients in float32, and let it have such a gradient."""
    if factor > 1 and tensor.requires_grad:
        tensor.grad = None  # one of another type would be refused
        tensor.grad_dtype = torch.float32
