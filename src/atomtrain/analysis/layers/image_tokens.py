"""In the place of a check that models do of their data: as many image tokens as image features.

Models that read images put features in the places of one token (`masked_scatter`). With too many
features the last ones would be dropped in silence; shapes do not tell, since how many tokens there
are depends on data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from atomtrain.errors import ConfigError

_SCATTER = torch.ops.aten.masked_scatter.default
_EQUAL = torch.ops.aten.eq.Scalar
_RESHAPED = {
    torch.ops.aten.unsqueeze.default, torch.ops.aten.expand.default, torch.ops.aten.to.device,
    torch.ops.aten.to.dtype, torch.ops.aten.expand_as.default, torch.ops.aten.to.dtype_layout,
}  # fmt: skip
"""What may be between a comparison and the places that it marks."""
_KEYS = ("image_token_id", "image_token_index")


class ImageTokens(NamedTuple):
    """How many tokens of a micro-batch must stand for images."""

    entry: str
    """Name of the tensor with the tokens."""
    token: int
    features: int

    def check(self, tensors: Mapping[str, Any]) -> None:
        """Refuse a micro-batch with more or fewer such tokens.

        Raises:
            ConfigError: it has.
        """
        ids = tensors.get(self.entry)
        if not isinstance(ids, Tensor) or ids.is_meta:
            return
        if (found := int((ids == self.token).sum())) != self.features:
            raise ConfigError(
                f"{self.entry} has {found} image tokens ({self.token}), and the images of a "
                f"micro-batch have {self.features} features; give each image as many tokens as "
                "the model's processor does"
            )


def image_tokens(
    model: nn.Module, graph: fx.Graph, inputs: Mapping[fx.Node, int], names: Sequence[str]
) -> list[ImageTokens]:
    """Return what must hold of each micro-batch of a model whose configuration names the token.

    Args:
        model: Any; of one without such a configuration nothing is known.
        graph: Its operations.
        inputs: Placeholders of the micro-batch's tensors, with their positions.
        names: Of these tensors, by position.
    """
    config = getattr(model, "config", None)
    known = {getattr(config, key, None) for key in _KEYS} - {None}
    found = []
    for node in graph.nodes if known else ():
        if node.op != "call_function" or node.target is not _SCATTER:
            continue
        values, mask, source = node.args
        while mask.target in _RESHAPED:
            mask = mask.args[0]
        if mask.target is not _EQUAL or mask.args[0] not in inputs or mask.args[1] not in known:
            continue
        width = values.meta["val"].shape[-1]
        features = source.meta["val"].numel() // width
        found.append(ImageTokens(names[inputs[mask.args[0]]], mask.args[1], features))
    return found
