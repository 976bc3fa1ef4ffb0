"""Layers of exported models with their operations rewritten."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from atomtrain.analysis.layers.graph_layer import GraphLayer, Mode, OtherMode, Template

Rewrite = Callable[[fx.Graph], fx.Graph]


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
        """The mode of the layer."""
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
        self._module = fx.GraphModule(nn.Module(), self.graph)
