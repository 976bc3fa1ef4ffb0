"""Leading layers that may run on the host: who they are, and the chain that is left for the device.

Without its leading layers a chain is a chain again: what they write has become an input, one that
gets a gradient. So plans with layers on the host are searched for like all others.
"""

from __future__ import annotations

from typing import NamedTuple

from atomtrain.analysis.costs.costs import ChainCosts, LayerCost
from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.cost.segments import Rest, segments_of
from atomtrain.planning.plan.disk import DiskUse
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.shape import Shape
from atomtrain.planning.plan.updating import ADAMW_BYTES, UpdateModel

_DENSE_GRADIENT_PASSES = 3
"""An embedding's backward writes a gradient of the whole matrix, which is then added: it is written
once and read once, the sum is read and written, of which one overlaps."""
_ROWS_PASSES = 3
"""Rows are read, written and copied out, and so are their gradients."""


def host_choices(chain: Chain, costs: ChainCosts) -> list[int]:
    """Return the numbers of leading layers that may run on the host, 0 among them.

    They only look up: no products, no random numbers, no changes to buffers, and less to hand on
    than to load.
    """
    count = 0
    while count + 1 < len(chain.layers) and _may(costs.layers[count]):
        count += 1
    written = [costs.values[name] for name in chain.writes(0, count)]
    loaded_bytes = sum(cost.parameter_bytes for cost in costs.layers[:count])
    pays = sum(value.n_bytes for value in written) < loaded_bytes
    return [0, count] if pays and all(value.dtype is not None for value in written) else [0]


def _may(cost: LayerCost) -> bool:
    return not (cost.forward_flops or cost.random or cost.changes_buffers or not cost.parameters)


def without(chain: Chain, costs: ChainCosts, host_layers: int) -> Rest:
    """Return the chain that is left without its leading layers."""
    if not host_layers:
        return Rest(chain, costs)
    rests = segments_of(chain, costs).rests
    if host_layers not in rests:
        rests[host_layers] = _without(chain, costs, host_layers)
    return rests[host_layers]


def _without(chain: Chain, costs: ChainCosts, host_layers: int) -> Rest:
    rest = chain.layers[host_layers:]
    used = {name for layer in rest for name in layer.reads}
    inputs = tuple(n for n in (*chain.inputs, *chain.writes(0, host_layers)) if n in used)
    return Rest(
        Chain(rest, inputs, chain.loss, chain.names, chain.gradient_factor),
        ChainCosts(costs.layers[host_layers:], costs.values),
    )


def blocks_of_host(chain: Chain, rest: Chain, of_rest: Layout, host_layers: int) -> frozenset[int]:
    """Return the blocks of the rest of which layers on the host use a part."""
    used = {id(p) for layer in chain.layers[:host_layers] for p in layer.parameters.values()}
    return frozenset(of_rest.block_of[id(p)] for p in rest.parameters if id(p) in used)


class HostTime(NamedTuple):
    """What a step takes longer for layers on the host."""

    forward_s: float = 0.0
    """Before the device's first visit."""
    backward_s: float = 0.0
    """After its last one: backward, and then the update."""

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s


def host_time(
    chain: Chain,
    costs: ChainCosts,
    host_layers: int,
    machine: Machine,
    micro_batches: int,
    disk: DiskUse,
    updates: UpdateModel,
) -> HostTime:
    """Return what a step takes longer for its leading layers on the host.

    Args:
        chain: The whole model.
        disk: Of the whole chain.
    """
    if not host_layers:
        return HostTime()
    layers = costs.layers[:host_layers]
    update_rate = machine.update_parameters_per_s
    bytes_per_s = machine.host_copy_bytes_per_s or ADAMW_BYTES * update_rate
    dense = _DENSE_GRADIENT_PASSES * sum(cost.parameter_bytes for cost in layers)
    written = sum(costs.values[name].n_bytes for name in chain.writes(0, host_layers))
    rows_s = micro_batches * _ROWS_PASSES * written / bytes_per_s
    dense_s = micro_batches * dense / bytes_per_s
    on_disk_s = 0.0
    if disk.on_disk:
        n_bytes = sum(sum(block) for block in disk.blocks[:host_layers])
        on_disk_s = sum(n_bytes / rate for rate in machine.storage_rates)
    used = {id(p) for layer in chain.layers[:host_layers] for p in layer.parameters.values()}
    work = sum(one.host_work for key, one in updates.parameters.items() if key in used)
    return HostTime(rows_s, rows_s + dense_s + on_disk_s + work / update_rate)


def whole_shape(shape: Shape, chain: Chain, rest: Chain, host_layers: int) -> Shape:
    """Return a shape of the rest as a shape of the chain."""
    if not host_layers:
        return shape
    moved = _moved(shape, host_layers, rest, Layout(rest), Layout(chain))
    return moved._replace(host_layers=host_layers)


def rest_shape(shape: Shape, chain: Chain, rest: Chain) -> Shape:
    """Return a shape of the chain as a shape of the rest, without its layers on the host."""
    if not shape.host_layers:
        return shape
    moved = _moved(shape, -shape.host_layers, rest, Layout(chain), Layout(rest))
    return moved._replace(host_layers=0)


def _moved(shape: Shape, layers: int, rest: Chain, of: Layout, to: Layout) -> Shape:
    """Return a shape with its bounds so many layers further up, and its blocks as `to` has them."""

    def there(blocks: tuple[int, ...]) -> tuple[int, ...]:
        # By parameter: several weights may have the same users, and one that only one layer on the
        # device uses is that layer's own there.
        keys = (id(p) for p in rest.parameters)
        return tuple(sorted({to.block_of[k] for k in keys if of.block_of[k] in blocks}))

    return shape._replace(
        forward_bounds=tuple(bound + layers for bound in shape.forward_bounds),
        backward_bounds=tuple(bound + layers for bound in shape.backward_bounds),
        resident_blocks=there(shape.resident_blocks),
        device_blocks=there(shape.device_blocks),
    )
