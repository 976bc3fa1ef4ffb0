"""Makes plans for a model on one device or several, whenever an engine needs one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.calibration.compile_choice import CompileChoice
from atomtrain.engine.calibration.machines import budget_bytes
from atomtrain.engine.calibration.profiling import Profile
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError
from atomtrain.planning.cost.costing import Given, spans_of
from atomtrain.planning.cost.timeline import Span, step_time
from atomtrain.planning.plan.disk import DiskRequest, OnDisk, States, on_disk_up_to
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.plan import Plan, Request
from atomtrain.planning.plan.updating import UpdateModel, shared_updates, two_moments
from atomtrain.planning.search.search import make_plan
from atomtrain.progress import Progress
from atomtrain.topology import allowed_cores


@dataclass(frozen=True)
class Planner:
    """What was learnt about model and machine, from which plans are made."""

    chain: Chain
    costs: ChainCosts
    times: Mapping[str, LayerTime]
    machine: Machine
    options: Options
    updates: UpdateModel | None = None
    """What the optimizer takes; `None` is AdamW."""
    states: States | None = None
    """The optimizer's state of each parameter, if part of it may lie on disk."""
    one_memory: bool = False
    """Whether the device is the host: then nothing is resident and no layer apart."""
    devices: int = 1
    """How many devices share a step's micro-batches, by the same plan."""
    crowded_share: float = 0.0
    """What other programs had of the processor while machine and times were measured."""
    compiling: CompileChoice = CompileChoice(False, "")  # noqa: RUF009 (it is never changed)
    """Whether the chain's layers are compiled, and why."""
    before: str = ""
    """What became of the plan that the training had before, if the options have one."""

    def plan(self, micro_batches: int, on_disk: OnDisk | None = None) -> Plan:
        """Return the best plan for so many micro-batches of a step on each device.

        `on_disk` says what lies on disk already; `None` leaves it to options and planner.
        """
        request = self.request(micro_batches, on_disk)
        with Progress("planning"):
            return make_plan(self.chain, self.costs, self.times, self.machine, request)

    def request(self, micro_batches: int, on_disk: OnDisk | None = None) -> Request:
        """Return what is asked of a plan; arguments as of `plan`."""
        if on_disk is None and self.options.on_disk is not None:
            on_disk = on_disk_up_to(self.options.on_disk)
        disk = None
        if self.states is not None:
            disk = DiskRequest(states=self.states, on_disk=on_disk)
        resident, there = self._pinned()
        return Request(
            micro_batches=micro_batches,
            segments=self.options.segments,
            slots=self.options.slots,
            gradient_buffers=self.options.gradient_buffers,
            host_layers=0 if self.one_memory else self.options.host_layers,
            activations=self.options.activations,
            offload=not self.one_memory,  # nothing would be gained where both memories are one
            resident=resident,
            device_blocks=there,
            updates=self._shared_updates(),
            disk=disk,
            clips=self.options.waits,
            devices=self.devices,
            spends=self.options.spend_gradients and not self.one_memory,
        )

    def spans(self, plan: Plan) -> tuple[Span, ...]:
        """Return what the plan expects each stream to do in a step."""
        spans = spans_of(
            plan,
            self.given,
            states=self.states,
            clips=self.options.waits,
            updates=self._shared_updates(),
            devices=self.devices,
        )
        return tuple(span for span in spans if span.end_s > span.start_s)

    def with_costs(self, costs: ChainCosts) -> Planner:
        """Return what plans for other costs of the same layers; their times grow as FLOPs do."""
        times = {}
        for old, new in zip(self.costs.layers, costs.layers, strict=True):
            before, now = (cost.forward_flops + cost.backward_flops for cost in (old, new))
            times[new.kind] = self.times[old.kind].scaled(now / before if before else 1.0)
        return dataclasses.replace(self, costs=costs, times=times)

    def measured_again(self, profile: Profile) -> Planner:
        """Return what plans for one device by a newer profile; budgets, disk and optimizer stay."""
        old = self.machine
        fields = [field.name for field in dataclasses.fields(old)]
        kept = {
            name: getattr(old, name)
            for name in fields
            if name.startswith("storage_") or name.endswith("_memory_bytes")
        }
        return dataclasses.replace(
            self,
            machine=dataclasses.replace(profile.machine, **kept),
            times=profile.times,
            crowded_share=profile.crowded_share,
        )

    def timed(self, plan: Plan) -> Plan:
        """Return a plan with the times that are predicted for it now."""
        times = step_time(self.spans(plan))
        return dataclasses.replace(plan, bound=times.bound, **times._asdict())

    @property
    def given(self) -> Given:
        """Model and machine."""
        return Given(chain=self.chain, costs=self.costs, times=self.times, machine=self.machine)

    def _shared_updates(self) -> UpdateModel | None:
        if self.devices == 1:
            return self.updates
        return shared_updates(self.updates or two_moments(self.chain), self.chain, self.devices)

    def _pinned(self) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the resident blocks, and those on the device, as far as the options fix them."""
        if self.one_memory:
            return (), ()
        if self.devices > 1:
            return None, ()
        if self.options.optimizer_on_device is None:
            return None, None
        if not self.options.optimizer_on_device:
            return None, ()
        every = tuple(range(Layout(self.chain).blocks))
        return every, every


def without_choices(options: Options, device: torch.device) -> Options:
    """Return what of a deterministic run is not left to the planner.

    Plans follow measurements, and a GPU rounds otherwise than the host. So unless the caller has
    said it, all layers run on the GPU, and all updates on the host.
    """
    if not options.deterministic or device.type == "cpu":
        return options
    return dataclasses.replace(
        options,
        host_layers=options.host_layers or 0,
        optimizer_on_device=bool(options.optimizer_on_device),
    )


def check_shared(options: Options, devices: Sequence[Device]) -> None:
    """Refuse what several devices cannot share.

    Raises:
        ConfigError: an optimizer on the device: devices would have to exchange what they update.
    """
    if len(devices) > 1 and options.optimizer_on_device:
        raise ConfigError(
            "several devices are updated together, on the host; leave out optimizer_on_device, or "
            "use one device"
        )


def times_of_all(
    times: Mapping[str, LayerTime], devices: Sequence[Device]
) -> Mapping[str, LayerTime]:
    """Return what layers take while all devices compute: emulated ones share the host's cores."""
    if len(devices) == 1 or not isinstance(devices[0], EmulatedDevice):
        return times
    taking_turns = max(1.0, len(devices) * torch.get_num_threads() / len(allowed_cores()))
    return {kind: time.scaled(taking_turns) for kind, time in times.items()}


def machine_of_all(machine: Machine, devices: Sequence[Device]) -> Machine:
    """Return the first device's machine with the least budget of all."""
    return dataclasses.replace(machine, device_memory_bytes=budget_bytes(*devices))
