"""What a layer that runs by its own code must not keep from one forward to the next.

A step runs a layer once for each micro-batch and perhaps again to recompute, with parameters and
buffers in its slot: what forward keeps elsewhere is of another call than in an ordinary loop, and
what it puts in their places is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from atomtrain.analysis.export.attributes import attributes_of, changes_in
from atomtrain.analysis.export.outside import Outside
from atomtrain.analysis.layers.chain import Layer
from atomtrain.analysis.layers.front import OwnCode
from atomtrain.analysis.layers.graph_layer import GraphLayer
from atomtrain.errors import AnalysisError


@contextmanager
def keeping_nothing(layer: Layer, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse a layer whose forward, run within, changes more than buffers in place.

    Args:
        layer: Of any kind; one of traced operations cannot, and what runs before a language model
            has its modules given back what they had.
        tensors: Its parameters and buffers, new, without data.

    Raises:
        AnalysisError: it changes a parameter, keeps something on a module, or puts another tensor
            in the place of a buffer that is saved.
    """
    if isinstance(layer.module, GraphLayer | OwnCode):
        yield
        return
    saved = {
        f"{path}.{name}" if path else name
        for path, module in layer.module.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    put: list[str] = []

    def look(module: nn.Module, *_: object) -> None:
        now = dict(module.named_buffers(remove_duplicate=False))
        put.extend(name for name in now if name in saved and now[name] is not tensors.get(name))

    before, outside = attributes_of(layer.module), Outside(layer.module)
    hook = layer.module.register_forward_hook(look)
    try:
        yield
    finally:
        hook.remove()
    where = f"layer {layer.name!r}"
    if put:
        raise AnalysisError(
            f"{where}: forward puts another tensor in the place of the buffer {put[0]!r}, which "
            "would be lost; write into the buffer with copy_()"
        )
    if written := [name for name in layer.parameters if tensors[name]._version]:
        raise AnalysisError(
            f"{where}: forward changes the parameter {written[0]!r} in place, which would be lost; "
            "change it between steps, after engine.synchronize(), or compute with a changed copy"
        )
    for path, name in changes_in(before, attributes_of(layer.module)):
        raise AnalysisError(
            f"{where}: forward changes the attribute {name!r} of module {path!r}, and runs once "
            "for each micro-batch and again to recompute; keep such a state in a registered buffer"
        )
    outside.refuse()
