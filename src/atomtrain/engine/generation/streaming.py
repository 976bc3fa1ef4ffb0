"""A model on the host whose blocks pass through a device, each just before it runs.

Blocks are what a model's lists of modules hold. What lies outside of them (embedding, last
normalisation, head), what several of them share, and buffers stay on the device meanwhile. Two
slots take the blocks in turn: while one runs, the next is loaded. With memory to spare blocks get
places of their own and stay, in the end all of them.

The modules run as they are, on copies of their parameters, so nothing but the place differs from a
model that is resident. A parameter that is not on the device has no data there: using it by
another way than its block's forward is an error, and never a wrong result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.streams import Event
from atomtrain.engine.state.store import copy_on, view_of
from atomtrain.errors import PlanError
from atomtrain.units import format_bytes

_ALIGNED_BYTES = 512


class _Held(NamedTuple):
    """A parameter of a block: by which modules and names it is found, and where it lies."""

    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]
    offset_bytes: int


class _Block:
    """One unit of loading."""

    def __init__(self, held: list[_Held], n_bytes: int) -> None:
        self.held, self.n_bytes = held, n_bytes
        # To stand where the data is not; made once.
        self._absent = [
            _as_parameter(torch.empty_like(one.parameter, device="meta"), one) for one in held
        ]

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return where the parameters lie in `[n_bytes]` uint8."""
        return [view_of(memory, one.offset_bytes, one.parameter) for one in self.held]

    def put(self, values: list[Tensor] | None) -> None:
        """Have the modules use these values; `None`: what has no data."""
        for index, (one, absent) in enumerate(zip(self.held, self._absent, strict=True)):
            used = absent if values is None else _as_parameter(values[index], one)
            for module, name in one.places:
                module._parameters[name] = used

    def restore(self) -> None:
        """Have the modules use their own parameters again."""
        for one in self.held:
            for module, name in one.places:
                module._parameters[name] = one.parameter


def _as_parameter(data: Tensor, held: _Held) -> nn.Parameter:
    # Some operations choose their kernel by whether a weight is trained, even without autograd.
    return nn.Parameter(data, held.parameter.requires_grad)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the members of a model's outermost lists of modules that have parameters."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [one for one in child if next(one.parameters(), None) is not None]
        else:
            found += blocks_of(child)
    return found


def _units(model: nn.Module) -> tuple[_Block, list[tuple[nn.Module, _Block]]]:
    """Return what stays on the device, and the blocks that pass through it."""
    blocks = blocks_of(model)
    users = Counter(id(p) for block in blocks for p in set(block.parameters()))
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    stays = {id(p) for module in outside for p in module._parameters.values() if p is not None}
    stays |= {key for key, number in users.items() if number > 1}
    mine = [(block, _unit(block.modules(), lambda p: id(p) not in stays)) for block in blocks]
    return _unit(model.modules(), lambda p: id(p) in stays), mine


def _unit(modules: Iterable[nn.Module], wanted: Callable[[nn.Parameter], bool]) -> _Block:
    places: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and wanted(parameter):
                places.setdefault(id(parameter), (parameter, []))[1].append((module, name))
    held, n_bytes = [], 0
    for parameter, found in places.values():
        held.append(_Held(parameter, found, n_bytes))
        n_bytes += -(-parameter.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return _Block(held, n_bytes)


def gather(model: nn.Module, device: Device) -> None:
    """Move the parameters into host memory from which copies to `device` are fast."""
    rest, blocks = _units(model)
    for unit in (rest, *(block for _, block in blocks)):
        memory = device.host_empty(unit.n_bytes)  # [n_bytes] uint8
        for one, view in zip(unit.held, unit.views(memory), strict=True):
            view.copy_(one.parameter.data)
            one.parameter.data = view  # the old storage dies here


class Streamed:
    """A model that runs on a device inside a `with` block.

    Made outside of `Device.computing`, entered inside.

    Not thread-safe. The model's own parameters are read only, and are back in it afterwards.
    """

    def __init__(self, model: nn.Module, device: Device) -> None:
        """Take a model on the host, and a device with memory of its own.

        Raises:
            PlanError: what stays on the device and two blocks do not fit; says what they take.
        """
        self._model, self._device = model, device
        self._rest, self._blocks = _units(model)
        self._slot_bytes = max((block.n_bytes for _, block in self._blocks), default=0)
        self._slot_count = min(2, len(self._blocks))
        buffers_bytes = sum(buffer.nbytes for buffer in model.buffers())
        self._rest_bytes = self._rest.n_bytes + buffers_bytes
        self.least_bytes = self._rest_bytes + self._slot_count * self._slot_bytes
        """What has to be on the device at once, beside what prompts take."""
        self._check_budget()
        self._slots: list[Tensor] = []
        self._holds: list[int | None] = [None] * self._slot_count
        self._loaded: list[Event | None] = [None] * self._slot_count
        self._last = 0
        self._spare_bytes = 0
        self._kept: dict[int, Tensor] = {}
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def resident(self) -> bool:
        """Whether the whole model lies on the device by now."""
        return len(self._kept) == len(self._blocks)

    def _check_budget(self) -> None:
        budget_bytes = self._device.memory_bytes - self._device.reserved_bytes
        if self.least_bytes > budget_bytes:
            raise PlanError(
                f"the model does not fit a device budget of "
                f"{format_bytes(self._device.memory_bytes)}, not even block by block: to generate, "
                f"two blocks take {format_bytes(self._slot_count * self._slot_bytes)}, embedding "
                f"and head {format_bytes(self._rest_bytes)}; raise --device-memory above "
                f"{format_bytes(self.least_bytes + self._device.reserved_bytes)}"
            )

    def __enter__(self) -> Self:
        device = self._device
        try:
            memory = device.empty((self._rest.n_bytes,), torch.uint8)
            views = self._rest.views(memory)
            device.hold(self._copy(self._rest, views))
            for module in self._model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        self._buffers.append((module, name, buffer))
                        module._buffers[name] = copy_on(device, buffer)
            self._slots = [
                device.empty((self._slot_bytes,), torch.uint8) for _ in range(self._slot_count)
            ]
            self._rest.put(views)
            for index, (module, block) in enumerate(self._blocks):
                block.put(None)
                self._hooks += [
                    module.register_forward_pre_hook(lambda *_, at=index: self._before(at)),
                    module.register_forward_hook(lambda *_, at=index: self._after(at)),
                ]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        for unit in (self._rest, *(block for _, block in self._blocks)):
            unit.restore()
        for event in self._loaded:
            if event is not None:
                event.wait()  # a copy may still be on its way to a slot
        self._device.synchronize()
        self._hooks, self._buffers, self._slots, self._loaded = [], [], [], []
        self._kept.clear()

    def keep(self, spare_bytes: int) -> None:
        """Let blocks that come by from now on stay, as long as so many bytes last."""
        self._spare_bytes = spare_bytes

    def _copy(self, block: _Block, views: list[Tensor]) -> Event:
        """Have a block loaded once compute is done with what it was given so far."""
        device = self._device

        def load() -> None:
            for view, one in zip(views, block.held, strict=True):
                device.copy_in(view, one.parameter.data)

        return device.load.submit(load, after=[device.mark()])

    def _before(self, index: int) -> None:
        """Have a block on the device, and the next one on its way."""
        if index in self._kept:
            return
        block = self._blocks[index][1]
        if block.n_bytes <= self._spare_bytes:
            self._stay(index, block)
            return
        if index in self._holds:
            slot = self._holds.index(index)
        else:
            slot = (self._last + 1) % self._slot_count
            self._fetch(index, slot)
        event = self._loaded[slot]
        assert event is not None
        self._device.hold(event)
        block.put(block.views(self._slots[slot]))
        self._last = slot
        self._prefetch(index)

    def _prefetch(self, index: int) -> None:
        count = len(self._blocks)
        following = ((index + step) % count for step in range(1, count))
        coming = next((one for one in following if one not in self._kept), None)
        if coming is None or coming in self._holds:
            return
        if self._blocks[coming][1].n_bytes > self._spare_bytes:
            self._fetch(coming, (self._last + 1) % self._slot_count)

    def _fetch(self, index: int, slot: int) -> None:
        block = self._blocks[index][1]
        self._holds[slot] = index
        self._loaded[slot] = self._copy(block, block.views(self._slots[slot]))

    def _stay(self, index: int, block: _Block) -> None:
        self._spare_bytes -= block.n_bytes
        memory = self._device.empty((block.n_bytes,), torch.uint8)
        views = block.views(memory)
        self._device.hold(self._copy(block, views))
        block.put(views)
        self._kept[index] = memory
        if self.resident:
            self._slots.clear()

    def _after(self, index: int) -> None:
        if index not in self._kept:
            self._blocks[index][1].put(None)
