"""Micro-batch and tokens of a step chosen with the plan, and advice by planning again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.errors import ConfigError, PlanError
from atomtrain.planning.advice import (
    WORTH_SAYING,
    Setting,
    advice,
    next_gpu,
    possible_changes,
)
from atomtrain.planning.catalogue import GPUS, disk, estimate_times, gpu, machine_for
from atomtrain.planning.plan.disk import PAGE_BYTES
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.plan import Request
from atomtrain.planning.search.batch_search import (
    Compute,
    Prospect,
    Workload,
    covering_tokens,
    prospect,
)
from atomtrain.planning.search.search import TooSlowError, make_plan
from atomtrain.training.config.optimizing import named_optimizer, precision_of
from atomtrain.views.plans.report import forecaster
from atomtrain.views.plans.subject import Subject, subject

pytestmark = pytest.mark.slow

GIB = 1 << 30
FLOPS_PER_S = 1e12


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return subject("tiny")


def estimate(costs: ChainCosts) -> Mapping[str, LayerTime]:
    """Compute that needs the same time per token whatever the micro-batch."""
    return {
        layer.kind: LayerTime(
            layer.forward_flops / FLOPS_PER_S + 1e-9,
            (layer.forward_flops + layer.backward_flops) / FLOPS_PER_S + 1e-9,
        )
        for layer in costs.layers
    }


def slow_start(costs: ChainCosts) -> Mapping[str, LayerTime]:
    """Compute with a fixed cost a layer, so that larger micro-batches pay."""
    return {
        kind: LayerTime(time.forward_s + 1e-3, time.backward_s + 3e-3)
        for kind, time in estimate(costs).items()
    }


def even() -> Compute:
    return Compute(lambda analysis: estimate(analysis.costs), FLOPS_PER_S, FLOPS_PER_S)


def starting() -> Compute:
    return Compute(lambda analysis: slow_start(analysis.costs), FLOPS_PER_S, FLOPS_PER_S)


def machine(**fields: float) -> Machine:
    given = {
        "name": "test",
        "load_bytes_per_s": 1e9,
        "unload_bytes_per_s": 1e9,
        "update_parameters_per_s": 1e9,
        "device_memory_bytes": GIB,
        "host_memory_bytes": GIB,
    }
    return Machine(**{**given, **fields})  # type: ignore[arg-type]


def test_a_workload_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="give 64 or 128"):
        Workload(context_tokens=64, tokens_per_step=100)
    with pytest.raises(ConfigError, match=r"give 64$"):
        Workload(context_tokens=64, tokens_per_step=10)
    with pytest.raises(ConfigError, match="do not divide the 4 sequences"):
        Workload(context_tokens=64, tokens_per_step=256, micro_batch=3)
    with pytest.raises(ConfigError, match="micro_batch must be at least 1, not 0"):
        Workload(context_tokens=64, micro_batch=0)


def test_the_micro_batch_is_one_where_a_larger_one_does_not_pay(tiny: Subject) -> None:
    found = prospect(
        tiny.analyse, even(), machine(), Workload(context_tokens=64, tokens_per_step=64 * 16)
    )
    assert found.micro_batch == 1
    assert found.plan.micro_batches == 16
    assert found.tokens_per_step == 64 * 16


def test_the_micro_batch_grows_while_it_pays_and_fits(tiny: Subject) -> None:
    workload = Workload(context_tokens=64, tokens_per_step=64 * 12)
    roomy = prospect(tiny.analyse, starting(), machine(), workload)
    assert roomy.micro_batch > 1
    assert 12 % roomy.micro_batch == 0
    assert roomy.tokens_per_step == 64 * 12
    one = prospect(
        tiny.analyse, starting(), machine(), dataclasses.replace(workload, micro_batch=1)
    )
    assert roomy.tokens_per_s > one.tokens_per_s
    tight = prospect(
        tiny.analyse,
        starting(),
        machine(device_memory_bytes=one.plan.device_peak_bytes),
        workload,
    )
    assert tight.micro_batch < roomy.micro_batch
    assert tight.plan.device_peak_bytes <= one.plan.device_peak_bytes


def test_the_plan_is_that_of_the_planner(tiny: Subject) -> None:
    workload = Workload(context_tokens=64, tokens_per_step=256, micro_batch=2)
    found = prospect(tiny.analyse, even(), machine(), workload)
    analysis = tiny.analyse(2)
    plan = make_plan(
        analysis.chain, analysis.costs, estimate(analysis.costs), machine(),
        Request(micro_batches=2),
    )  # fmt: skip
    assert found.plan == plan
    assert found.tokens_per_s == 256 / plan.step_s


def test_spans_end_with_the_step_and_are_as_busy_as_the_plan_says(tiny: Subject) -> None:
    found = prospect(tiny.analyse, even(), machine(), Workload(context_tokens=64))
    assert max(span.end_s for span in found.spans) == pytest.approx(found.plan.step_s)
    compute_s = sum(s.end_s - s.start_s for s in found.spans if s.stream == "compute")
    assert compute_s == pytest.approx(found.plan.compute_s)


@pytest.mark.parametrize(
    ("precision", "name", "each_bytes"),
    [
        ("fp32", "adamw", 8), ("fp32", "adamw-bfloat16", 4), ("fp16", "adamw", 12),
        ("bf16", "adamw-split", 10), ("bf16", "adamw-bfloat16-split", 6),
    ],
)  # fmt: skip
def test_what_lies_on_disk_follows_precision_and_optimizer(
    precision: str, name: str, each_bytes: int
) -> None:
    """Moments, and beside 16-bit parameters a float32 master."""
    model = subject("tiny").trained_with(
        lambda owned: named_optimizer(owned, name, precision), precision_of(precision)
    )
    workload = Workload(
        context_tokens=64, tokens_per_step=64, disk=True, on_disk="masters", clips=True
    )
    with_disk = disk("nvme-pcie4").of(machine())
    found = prospect(model.analyse, even(), with_disk, workload)
    whole_pages = 3 * PAGE_BYTES * len(list(model.model.parameters()))
    assert 0 <= found.plan.disk_bytes - each_bytes * model.parameters < whole_pages
    assert found.spans


def test_nothing_fits_is_an_error(tiny: Subject) -> None:
    with pytest.raises(PlanError):
        prospect(
            tiny.analyse, even(), machine(device_memory_bytes=100), Workload(context_tokens=64)
        )


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("load_bytes_per_s", [1e7, 1e9, 1e11])
def test_tokens_of_a_step_let_compute_cover_the_link(
    tiny: Subject, load_bytes_per_s: float, clips: bool
) -> None:
    analysis = tiny.analyse(1)
    times = estimate(analysis.costs)
    here = machine(load_bytes_per_s=load_bytes_per_s)
    tokens = covering_tokens(analysis, times, here, 64, clips=clips)

    def share(n: float) -> float:
        forward_s = n / 64 * sum(times[c.kind].forward_s for c in analysis.costs.layers)
        backward_s = n / 64 * sum(times[c.kind].backward_s for c in analysis.costs.layers)
        load_s = analysis.parameter_bytes / load_bytes_per_s
        back_s, update_s = analysis.parameter_bytes / 1e9, analysis.parameters / 1e9
        waits = [max(load_s, update_s), back_s] if clips else [load_s, max(back_s, update_s)]
        bound_s = max(forward_s, waits[0]) + max(backward_s, load_s, waits[1])
        return (forward_s + backward_s) / bound_s

    assert share(tokens) >= 0.95
    assert tokens == 1 or share(0.98 * (tokens - 1)) < 0.95


def setting_of(tiny: Subject, name: str, **fields: float) -> Setting:
    card = gpu(name)
    return Setting(
        machine=dataclasses.replace(machine_for(card, GIB), **fields),  # type: ignore[arg-type]
        workload=Workload(context_tokens=tiny.context_tokens, tokens_per_step=128),
        card=card,
    )


def test_advice_is_planned_again_sorted_and_worth_saying(tiny: Subject) -> None:
    setting = setting_of(tiny, "rtx-3090")
    forecast = forecaster(tiny)
    now = forecast(setting)
    found = advice(now, possible_changes(now, setting), forecast)
    assert found
    ratios = [item.speed_ratio for item in found]
    assert ratios == sorted(ratios, reverse=True)
    assert min(ratios) > WORTH_SAYING
    by_text = {change.text: change for change in possible_changes(now, setting)}
    for item in found:
        then = forecast(by_text[item.text].setting)
        assert item.tokens_per_s == then.tokens_per_s
        assert item.speed_ratio == then.tokens_per_s / now.tokens_per_s
    assert advice(now, possible_changes(now, setting), forecast) == found


def test_each_change_changes_one_thing(tiny: Subject) -> None:
    setting = setting_of(tiny, "rtx-3090")
    now = forecaster(tiny)(setting)
    for change in possible_changes(now, setting):
        differs = [
            name
            for name in ("machine", "card", "dtype")
            if getattr(change.setting, name) != getattr(setting, name)
        ]
        if change.setting.workload.tokens_per_step != now.tokens_per_step:
            differs.append("tokens")
        # Another GPU comes with its own link and memory.
        assert differs in (["machine"], ["tokens"], ["dtype"], ["machine", "card"]), change.text


def test_a_slow_link_is_the_first_thing_to_change(tiny: Subject) -> None:
    rates = {"load_bytes_per_s": 1e6, "unload_bytes_per_s": 1e6}
    setting = setting_of(tiny, "rtx-3090", device_memory_bytes=2 << 20, **rates)
    workload = dataclasses.replace(setting.workload, tokens_per_step=64)
    setting = dataclasses.replace(setting, workload=workload)
    forecast = forecaster(tiny)
    now = forecast(setting)
    found = {item.text: item for item in advice(now, possible_changes(now, setting), forecast)}
    faster_link = found["PCIe 5 instead of 4"]
    assert faster_link.speed_ratio == pytest.approx(2, rel=0.1)
    assert found["twice the tokens a step: 128"].speed_ratio == pytest.approx(2, rel=0.1)


def test_plans_that_are_too_slow_are_not_made(tiny: Subject) -> None:
    setting = setting_of(tiny, "rtx-3090")
    forecast = forecaster(tiny)
    now = forecast(setting)
    assert forecast(setting, 0.9 * now.tokens_per_s).tokens_per_s == now.tokens_per_s
    with pytest.raises(TooSlowError, match="no plan takes less than"):
        forecast(setting, 1.02 * now.tokens_per_s)


def test_changes_that_fit_nothing_are_left_out(tiny: Subject) -> None:
    setting = setting_of(tiny, "rtx-3090")
    now = forecaster(tiny)(setting)

    def refuse(_: Setting, least_tokens_per_s: float) -> Prospect:
        assert least_tokens_per_s == WORTH_SAYING * now.tokens_per_s
        raise PlanError("nothing fits")

    assert advice(now, possible_changes(now, setting), refuse) == ()


def test_the_next_gpu_is_faster_of_the_same_class_and_no_smaller() -> None:
    for card in GPUS.values():
        better = next_gpu(card, "fp32")
        if better is not None:
            assert better.flops_per_s["fp32"] > card.flops_per_s["fp32"]
            assert better.memory_bytes >= card.memory_bytes
            assert ("laptop" in better.name) == ("laptop" in card.name)
    following = next_gpu(gpu("rtx-3090"), "fp32")
    assert following is not None
    assert following.name == "rtx-4090"


def test_estimates_are_those_of_the_catalogue(tiny: Subject) -> None:
    setting = setting_of(tiny, "h100")
    found = forecaster(tiny)(dataclasses.replace(setting, dtype="tf32"))
    assert found.times == estimate_times(found.analysis.costs, "h100", "tf32")
