"""Updates that are delayed by one step, so that nothing waits for them.

Step *t* computes with what the gradients of steps 0 to *t* - 2 made of the parameters; those of
step *t* - 1 are applied while it runs. Forward and backward of a step see the same parameters, so
an update must not write where they are loaded from. It works in scratch and leaves the block's new
values in the place of its gradient, which has been used and is as large. When the step has loaded
the block for the last time the values move to where the next step loads them from, and the place
is free for the step's own gradient:

| buffer | producer | consumer | released by |
|---|---|---|---|
| host parameters | *showing*, after the last load of the step | load stream | `updated` of the \
blocks |
| host gradients | unload stream, then update stream | update stream, then showing | `updated` |

Gradients of a block that several segments deliver add up in their place from the first one on,
while the block is still to be loaded for the others; so its new values have a place of their own.

Whoever reads or writes the model between two steps first has all updates `settle`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError, StreamError
from atomtrain.planning.delayed import largest_update_bytes
from atomtrain.planning.shape import Layers
from atomtrain.swapping.deciding import Decision
from atomtrain.swapping.device import Device
from atomtrain.swapping.options import Options
from atomtrain.swapping.store import view_of
from atomtrain.swapping.streams import Event, Inject, Stream, finished
from atomtrain.swapping.updates import Updates


def check_delays(options: Options, devices: Sequence[Device]) -> None:
    """Refuse devices on which updates cannot be one step late, if they are to be.

    Raises:
        ConfigError: there are several, or the device has no memory of its own.
    """
    if options.delay_updates and (devices[0].one_memory or len(devices) > 1):
        what = "several devices" if len(devices) > 1 else "device='cpu'"
        raise ConfigError(
            f"with {what} updates cannot be one step late; leave out delay_updates "
            "(--delay-updates), or choose one device with memory of its own, such as 'emulated'"
        )


class DelayedUpdates(Updates):
    """Updates that the step after next is the first to see."""

    delays = True

    def __init__(self, *given: Any, inject: Inject | None = None, **more: Any) -> None:
        """Open the streams; arguments are those of `Updates`."""
        super().__init__(*given, inject=inject, **more)
        layout = self._store.layout
        self._scratch = torch.empty(largest_update_bytes(layout), dtype=torch.uint8)
        self._showing = Stream("show", inject)
        self._applied: list[Event] = [finished() for _ in self._blocks]
        """Of each block, done when its last update was computed; `updated`: when it is shown."""
        self._hidden: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By block, parameters and their new values that are not shown yet."""
        self._apart: dict[int, Tensor] = {}
        """New values that have a place of their own, by the parameter's `id`."""
        self._added_up: set[int] = set()
        self._shown: set[int] = set()

    def begin_step(self, deliveries: Mapping[Layers, Iterable[int]]) -> None:
        """Start a step in which these segments deliver gradients of these blocks."""
        super().begin_step(deliveries)
        self._shown = set()
        delivered = Counter(block for blocks in deliveries.values() for block in blocks)
        self._added_up = {block for block, count in delivered.items() if count > 1}

    def loaded(self, layers: Layers, blocks: Iterable[int], event: Event) -> None:
        """Show what the step before made of blocks, once `event` is done.

        Args:
            layers: The segment that will deliver gradients of the blocks.
            blocks: Those that it delivers.
            event: Done when this step needs the blocks in host memory no more, unless others are to
                deliver gradients too.
        """
        for block in blocks:
            if self._arrivals.lacks_only(layers, block):
                after = [event, self._applied[block]]
                self.updated[block] = self._showing.submit(self._show_job(block), after)
                self._shown.add(block)

    def places_free(self, blocks: Iterable[int]) -> Sequence[Event]:
        """Return the events before which no gradients of these blocks may come."""
        return [
            (self._applied if block in self._added_up else self.updated)[block] for block in blocks
        ]

    def submitted(self, block: int) -> bool:
        """Return whether what the next step loads of the block is shown, or will be."""
        return block in self._shown

    def divisible(self, block: int) -> Sequence[Any]:
        """Return nothing: blocks are shown as a whole."""
        return ()

    def settle(self) -> None:
        """Apply all updates, and show them; nothing may be on its way to the device."""
        self.wait()
        for block in range(len(self._blocks)):
            self._settle(block)
        self._apart.clear()  # the next plan may need none

    def settle_range(self, start_bytes: int, stop_bytes: int) -> list[int]:
        """The same for the blocks that overlap a range of the arena; return them."""
        blocks = super().settle_range(start_bytes, stop_bytes)
        for block in blocks:
            self._settle(block)
        return blocks

    def wait(self) -> None:
        """Block until all updates are computed."""
        super().wait()
        for event in self._applied:
            event.wait()

    def close(self) -> None:
        """Finish the queued updates, show them unless one failed, and end the threads."""
        super().close()
        self._showing.close()
        with suppress(StreamError):  # whoever drives the engine has been told
            self.settle()
        self._hidden.clear()
        self._scratch = self._scratch[:0].clone()

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All streams of the host."""
        return (*super().streams, self._showing)

    @property
    def _order_at_end(self) -> Sequence[int]:
        """The blocks as backward of the next step wants their places: by the first user that
        delivers a gradient, which is the only one unless several do."""

        def delivers(block: int) -> int:
            users = self._store.layout.users(block)
            return users[-1] if block in self._added_up else users[0]

        return sorted(self._order, key=delivers, reverse=True)

    def _begin_update(
        self, block: int, decision: Decision, after: Sequence[Event], label: str | None = None
    ) -> None:
        # It starts from what the update before it left.
        after = [*after, self.updated[block]]
        self._applied[block] = self._submit(block, decision, after, label)

    def _settle(self, block: int) -> None:
        self.updated[block].wait()
        self._applied[block].wait()
        self._show_job(block)()

    def _show_job(self, block: int) -> Callable[[], None]:
        def show() -> None:
            for parameter, value in self._hidden.pop(block, ()):
                parameter.copy_(value)

        return show

    def _update_job(
        self, block: int, decision: Decision, members: Sequence[nn.Parameter] | None = None
    ) -> Callable[[], None]:
        """Return the update of a block, always a whole one, whose result is hidden."""
        update = super()._update_job(block, decision)
        touched, apart = self.touched, block in self._added_up

        def update_hidden() -> None:
            if decision.skip or self._workers[block] is None:
                update()
                return
            changing = [p for p in self._blocks[block] if p.requires_grad and id(p) in touched]
            shown = [p.data for p in changing]
            for parameter in changing:
                parameter.data = self._in_scratch(block, parameter).copy_(parameter.data)
            try:
                update()
            finally:
                made = [p.data for p in changing]
                for parameter, data in zip(changing, shown, strict=True):
                    parameter.data = data
            self._hidden[block] = hidden = []
            for parameter, data, value in zip(changing, shown, made, strict=True):
                place = self._place_of(parameter, apart=apart)
                hidden.append((data, place.copy_(value)))

        return update_hidden

    def _in_scratch(self, block: int, parameter: nn.Parameter) -> Tensor:
        trained = self._store.layout.gradients
        offset = trained.offsets[id(parameter)] - trained.block_range(block)[0]
        return view_of(self._scratch, offset, parameter.data)

    def _place_of(self, parameter: nn.Parameter, *, apart: bool) -> Tensor:
        """Return where a parameter's new values wait."""
        if not apart:  # wider, perhaps, but of no fewer bits
            return self._store.gradient(parameter)
        if id(parameter) not in self._apart:
            self._apart[id(parameter)] = torch.empty_like(parameter.data)
        return self._apart[id(parameter)]
