"""Low-rank adapters of embeddings, as `peft` names and computes them.

Token `i` gets `E[i] + alpha/r * B A[:, i]` with `A [r, V]` and `B [D, r]` trained, where `A` begins
at zero. peft's have neither dropout nor another beginning; its DoRA of embeddings is left out.
Where a module multiplies what it looks up by its `embed_scale` (Gemma), that counts for the adapter
too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.errors import ConfigError
from atomtrain.models.lora_config import NOTHING, LoraConfig
from atomtrain.models.lora_init import generator_of

_FACTOR = "embed_scale"
EMBEDDING_PARTS = "lora_embedding_A", "lora_embedding_B"


class LoraEmbedding(nn.Embedding):
    """A frozen embedding with an adapter: ids `[...]` to `[..., D]`.

    It goes before the embedding's own class, whose forward stays.
    """

    scale: float
    lora_embedding_A: nn.Parameter  # noqa: N815  (as peft names it)
    lora_embedding_B: nn.Parameter  # noqa: N815  (as peft names it)

    def forward(self, input: Tensor) -> Tensor:
        of_tokens = F.embedding(input, self.lora_embedding_A.T, self.padding_idx)  # [..., r]
        added = of_tokens @ self.lora_embedding_B.T * self.scale
        factor = getattr(self, _FACTOR, None)
        if factor is not None:
            added = added * (factor.to(added.dtype) if isinstance(factor, Tensor) else factor)
        return super().forward(input) + added

    def beginning(self, _: Callable[[], Tensor], seed: str) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of the adapter before the first step, when it says nothing."""
        yield "lora_embedding_A", torch.zeros(self.lora_embedding_A.shape)
        shape = self.lora_embedding_B.shape
        yield "lora_embedding_B", torch.randn(shape, generator=generator_of(seed))


@functools.cache
def _adapted_class(base: type[nn.Embedding]) -> type[nn.Embedding]:
    # One class for each of the model's, since modules of one class are traced once for all.
    if base is nn.Embedding:
        return LoraEmbedding
    return type(f"Lora{base.__name__}", (LoraEmbedding, base), {})


def adapt_embedding(module: nn.Embedding, config: LoraConfig) -> None:
    """Give a frozen embedding an adapter, in place."""
    like, tokens, width = module.weight, module.num_embeddings, module.embedding_dim
    module.__class__ = _adapted_class(type(module))  # type: ignore[arg-type]
    assert isinstance(module, LoraEmbedding)
    module.scale = config.scale
    module.lora_embedding_A = nn.Parameter(like.new_empty(config.r, tokens))
    module.lora_embedding_B = nn.Parameter(like.new_empty(width, config.r))


def embeddings_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the embeddings that can be adapted, by path: those that change no weights, and look
    ids up as they are, or multiply that by a number."""
    return {
        path: module
        for path, module in model.named_modules()
        if path and isinstance(module, nn.Embedding) and module.max_norm is None
        if type(module) is nn.Embedding or _is_number(getattr(module, _FACTOR, None))
    }


def _is_number(factor: object) -> bool:
    alone = isinstance(factor, Tensor) and factor.numel() == 1
    return alone or isinstance(factor, int | float)


def check_embedding(model: nn.Module, path: str, config: LoraConfig | None = None) -> None:
    """Refuse to adapt an embedding that another module shares, or as embeddings are not adapted.

    Raises:
        ConfigError: says what to do instead.
    """
    name = path.rpartition(".")[2]
    own: Any = model.get_parameter(f"{path}.weight")
    every = model.named_parameters(remove_duplicate=False)
    if shared := [other for other, p in every if p is own and other != f"{path}.weight"]:
        raise ConfigError(
            f"--lora targets={name} is an embedding whose weight is {shared[0]!r} too, and an "
            f"adapter would be of one of them only; give modules_to_save={name} in its place"
        )
    if config is not None and (config.dora or config.init != NOTHING):
        raise ConfigError(
            f"--lora targets={name} is an embedding, whose adapter has no dora and begins at "
            "nothing; leave dora and init out, or the embedding"
        )
