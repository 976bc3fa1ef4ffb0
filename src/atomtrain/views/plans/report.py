"""Everything that `atom plan` says about a model on a machine, as data.

Where nothing fits it says what would do: the least catalogue GPU and host, found by planning again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from atomtrain.errors import PlanError
from atomtrain.planning.advice import Advice, Setting, advice, possible_changes
from atomtrain.planning.catalogue import DEVICE_MEMORY_SHARE, GPUS
from atomtrain.planning.plan.disk import KINDS
from atomtrain.planning.plan.updating import two_moments
from atomtrain.planning.search.batch_search import Analysis, Compute, Prospect, prospect
from atomtrain.views.plans.subject import Subject, compute_of

STREAM_FIELDS = ("compute_s", "load_s", "unload_s", "update_s", "disk_s")
_ENDLESS_BYTES = 1 << 59
_GIB = 1 << 30
_MOST_NAMED = 4
_LEAN_BYTES = 9
"""Of host memory a parameter: what bfloat16 parameters with 8-bit moments take, and a little."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A model, a machine, the plan for both, and what would be faster."""

    model: str
    parameters: int
    """Shared weights counted once."""
    setting: Setting
    prospect: Prospect
    peak_flops_per_s: float
    """Of all devices, by their data sheet or by measurement."""
    advice: tuple[Advice, ...]
    images: str | None = None
    """Which are counted, for people; `None`: those of the configuration, or none."""

    @property
    def host_bytes_per_parameter(self) -> float:
        """Host bytes of the plan, values kept for backward included, by parameters."""
        return self.prospect.plan.host_bytes / self.parameters

    @property
    def state_bytes_per_parameter(self) -> float:
        """Bytes of a parameter, its gradient and its optimizer state."""
        analysis = self.prospect.analysis
        taken = analysis.updates or two_moments(analysis.chain)
        state_bytes = taken.host_bytes - taken.scratch_bytes
        return (2 * analysis.parameter_bytes + state_bytes) / self.parameters

    @property
    def peak_share(self) -> float:
        """Useful FLOP/s by the device's peak; recomputing does not count as useful."""
        return self.prospect.flops_per_s / self.peak_flops_per_s

    @property
    def busy_shares(self) -> dict[str, float]:
        """Share of the step in which each resource is busy."""
        plan = self.prospect.plan
        fields = STREAM_FIELDS if plan.on_disk else STREAM_FIELDS[:-1]
        return {name[:-2]: getattr(plan, name) / plan.step_s for name in fields}

    def to_json(self) -> dict[str, Any]:
        found, card = self.prospect, self.setting.card
        return {
            "model": self.model,
            "gpu": None if card is None else card.name,
            "dtype": self.setting.dtype,
            "machine": found.machine.to_json(),
            "analysis": _analysis_json(found.analysis, self.parameters),
            "devices": found.devices,
            "plan": found.plan.to_json(),
            "images": self.images,
            "context_tokens": found.context_tokens,
            "micro_batch_sequences": found.micro_batch,
            "tokens_per_step": found.tokens_per_step,
            "tokens_per_s": found.tokens_per_s,
            "flops_per_s": found.flops_per_s,
            "peak_flops_per_s": self.peak_flops_per_s,
            "peak_share": self.peak_share,
            "busy_shares": self.busy_shares,
            "host_bytes_per_parameter": self.host_bytes_per_parameter,
            "state_bytes_per_parameter": self.state_bytes_per_parameter,
            "advice": [dataclasses.asdict(item) for item in self.advice],
        }


class Forecast(Protocol):
    """Finds the best plan in a setting."""

    def __call__(self, setting: Setting, least_tokens_per_s: float = 0.0) -> Prospect:
        """Slower plans than `least_tokens_per_s` need not be found."""


def forecaster(subject: Subject, local: Compute | None = None) -> Forecast:
    """Return a function that finds the best plan for a subject in any setting.

    `local` computes where a setting has no GPU of the catalogue.
    """

    def forecast(setting: Setting, least_tokens_per_s: float = 0.0) -> Prospect:
        compute = _compute(setting, local)
        machine, workload = setting.machine, setting.workload
        analyse = functools.partial(subject.analyse, on_gpu=compute.on_gpu)
        return prospect(analyse, compute, machine, workload, least_tokens_per_s)

    return forecast


def _compute(setting: Setting, local: Compute | None) -> Compute:
    if setting.card is not None:
        return compute_of(setting.card, setting.dtype)
    assert local is not None
    return local


def make_report(
    subject: Subject, setting: Setting, local: Compute | None = None, *, advise: bool = True
) -> Report:
    """Plan, then plan again with one thing changed at a time.

    Args:
        subject: The model.
        setting: Machine, workload and GPU.
        local: Compute of the device at hand, where the setting has no GPU of the catalogue.
        advise: Whether to look for what would be faster.

    Raises:
        PlanError: nothing fits; says what would.
        ConfigError: a workload that cannot be.
    """
    forecast = forecaster(subject, local)
    try:
        found = forecast(setting)
    except PlanError as error:
        raise explained(error, setting, least_fitting(setting, forecast)) from error
    return Report(
        model=subject.name,
        parameters=subject.parameters,
        setting=setting,
        prospect=found,
        peak_flops_per_s=found.devices * _compute(setting, local).peak_flops_per_s,
        advice=advice(found, possible_changes(found, setting), forecast) if advise else (),
        images=None if subject.pictured is None else subject.pictured.said,
    )


def _analysis_json(analysis: Analysis, parameters: int) -> dict[str, Any]:
    layers = analysis.costs.layers
    return {
        "parameters": parameters,
        "layers": len(layers),
        "layer_kinds": len({layer.kind for layer in layers}),
        "parameter_bytes": analysis.parameter_bytes,
        "forward_flops_per_micro_batch": sum(layer.forward_flops for layer in layers),
        "backward_flops_per_micro_batch": sum(layer.backward_flops for layer in layers),
        "largest_layer_bytes": max(layer.parameter_bytes for layer in layers),
        "largest_workspace_bytes": max(
            max(layer.graph_bytes, layer.kept_bytes + layer.backward_bytes) for layer in layers
        ),
    }


class Fitting(NamedTuple):
    """A machine that a model fits."""

    device_memory_bytes: int
    """The given budget, or the least of a GPU in the catalogue."""
    host_bytes: int
    """That the least plan takes: one micro-batch a device, nothing offloaded unless asked for."""
    cards: tuple[str, ...]
    """Names of the GPUs that do, by memory."""
    host_bytes_per_parameter: float


def least_fitting(setting: Setting, forecast: Callable[[Setting], Prospect]) -> Fitting | None:
    """Return the least device and host memory that would do; `None` if no GPU is large enough."""
    budgets = {int(DEVICE_MEMORY_SHARE * card.memory_bytes) for card in GPUS.values()}
    given = setting.machine.device_memory_bytes
    asked = setting.workload
    # The fastest plan would spend host memory on offloaded activations and waiting values.
    workload = dataclasses.replace(
        asked,
        micro_batch=asked.micro_batch or 1,
        tokens_per_step=asked.tokens_per_step or asked.devices * asked.context_tokens,
        activations=asked.activations or "recompute",
        on_disk=KINDS[-1] if asked.disk else None,
    )
    for budget in sorted({given, *(b for b in budgets if b > given)}):
        machine = dataclasses.replace(
            setting.machine, device_memory_bytes=budget, host_memory_bytes=_ENDLESS_BYTES
        )
        try:
            found = forecast(dataclasses.replace(setting, machine=machine, workload=workload))
        except PlanError:
            continue
        cards = sorted(GPUS.values(), key=lambda card: card.memory_bytes)
        names = [c.name for c in cards if DEVICE_MEMORY_SHARE * c.memory_bytes >= budget]
        host_bytes, parameters = found.plan.host_bytes, found.analysis.parameters
        return Fitting(budget, host_bytes, tuple(names), host_bytes / parameters)
    return None


def explained(error: PlanError, setting: Setting, fitting: Fitting | None) -> PlanError:
    """Return the planner's error with what would do."""
    if fitting is None:
        return PlanError(f"{error}; no GPU of the catalogue has memory enough for this micro-batch")
    advice = []
    if fitting.device_memory_bytes > setting.machine.device_memory_bytes:
        names = ", ".join(fitting.cards[:_MOST_NAMED])
        more = " and larger ones" if len(fitting.cards) > _MOST_NAMED else ""
        advice.append(f"GPUs with memory enough: {names}{more}")
    if fitting.host_bytes > setting.machine.host_memory_bytes:
        least = -(-fitting.host_bytes // _GIB)
        advice.append(f"raise --host-memory to at least {least}GiB")
        halved = setting.dtype in ("bf16", "fp16")
        if not halved or fitting.host_bytes_per_parameter > _LEAN_BYTES:
            advice.append(
                "or hold fewer bytes of each parameter: --precision bf16 with --optimizer "
                "adamw-split (14), adamw-bfloat16-split (10) or adamw-int8 (8)"
            )
    if not advice:
        return error
    return PlanError(f"{error}; {'; '.join(advice)}")
