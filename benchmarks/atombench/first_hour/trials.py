"""The parts of the first hour that train: peaks and bits of small models, and a step's timeline."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import atomtrain
from atombench.common import Result
from atombench.engine import large
from atombench.engine.large import LargeSetup
from atombench.first_hour.sizes import NEEDED, PartOrder, Size
from atomtrain.engine.devices.devices import open_device
from atomtrain.errors import reason_of
from atomtrain.models import GPT
from atomtrain.models.gpt_config import preset
from atomtrain.planning.cost.timeline import Span
from atomtrain.planning.plan.plan import Request
from atomtrain.planning.search.search import least_budget_bytes
from atomtrain.training.config.optimizing import named_optimizer, precision_of

_TIGHTER = 1.03
"""A tight cap over the least with which any plan works."""


def memory(order: PartOrder) -> Result:
    """Peaks, predicted and measured, and whether two runs give the same bits; GPT and Llama."""
    result: Result = {"models": {}, "skipped": {}}
    for name, make in (("gpt", _gpt), ("llama", _llama)):
        runs: list[_Run] = []
        for _ in range(2):
            try:
                runs.append(_trained(order, make))
            except ModuleNotFoundError as error:  # transformers, or what it needs
                result["skipped"][str(error.name)] = NEEDED["transformers"]
                break
            result["models"][name] = {
                **runs[0].keys,
                "same_bits": _same(*runs) if len(runs) == 2 else None,
            }
            order.keep(result)
    return result


class _Run(NamedTuple):
    keys: Result
    losses: list[float]
    state: dict[str, Tensor]


def _trained(order: PartOrder, make: Callable[[Size], nn.Module]) -> _Run:
    """Train a model for three steps in bfloat16 with the kernels that PyTorch chooses itself."""
    size, cuda = order.size, order.device == "cuda"
    torch.manual_seed(0)
    model = make(size)
    shape = (size.model_sequences, size.model.context)
    batches = [_tokens(size.model.vocabulary, shape) for _ in range(4)]
    device = open_device(order.device, size.model_memory)
    with atomtrain.swap(
        model,
        batches[0],
        optimizer=lambda _: named_optimizer(model, "adamw", "bf16"),
        device=device,
        # Else a model that fits would never be swapped.
        options=atomtrain.Options(
            micro_batches=len(batches),
            clip_norm=1.0,
            precision=precision_of("bf16"),
            optimizer_on_device=False,
            compile=False,
        ),
    ) as engine:
        losses, allocated, reserved, retries = [], 0, 0, 0
        for _ in range(3):
            losses.append(engine.step(batches))
            assert engine.last is not None
            allocated = max(allocated, engine.last.device_peak_bytes)
            reserved = max(reserved, engine.last.device_reserved_bytes)
            retries += engine.last.allocation_retries
        keys = {
            "predicted_peak_bytes": engine.plan.device_peak_bytes,
            "library_bytes": device.reserved_bytes,
            "allocated_peak_bytes": allocated,
            "reserved_peak_bytes": reserved if cuda else None,
            "allocation_retries": retries if cuda else None,
            "budget_bytes": device.memory_bytes,
            "segments": engine.plan.segments,
            "activations": dict(Counter(engine.plan.activations)),
            "losses": losses,
        }
        engine.synchronize()
        state = {name: value.clone() for name, value in engine.state_dict().items()}
    return _Run(keys, losses, state)


def _same(one: _Run, other: _Run) -> bool:
    return one.losses == other.losses and all(
        torch.equal(value, other.state[name]) for name, value in one.state.items()
    )


def _gpt(size: Size) -> nn.Module:
    return GPT(size.model)


def _llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.model.vocabulary,
            hidden_size=size.model.width,
            intermediate_size=8 * size.model.width // 3 // 16 * 16,
            num_hidden_layers=size.model.layers,
            num_attention_heads=size.model.heads,
            num_key_value_heads=max(1, size.model.heads // 2),
            max_position_embeddings=size.model.context,
            use_cache=False,
        )
    )


def _tokens(vocabulary: int, shape: tuple[int, int]) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (shape[0], shape[1] + 1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}


def timeline(order: PartOrder) -> Result:
    """A step's spans, predicted and measured: as it is, under a tight cap, and compiled."""
    setup = dataclasses.replace(order.size.timeline, device=order.device)
    result: Result = {"model": setup.model, "cases": {}, "skipped": {}}
    tight: str | None = None
    for name in ("plain", "tight", "compiled"):
        case = setup
        if name == "tight":
            assert tight is not None
            case = dataclasses.replace(setup, device_memory=tight)
        try:
            found, least_bytes = _recorded(case, compiled=name == "compiled")
        except Exception as error:
            if name != "compiled":
                raise
            # Compilers lack on some machines; what the others found is worth keeping.
            result["skipped"][name] = f"{type(error).__name__}: {reason_of(error)}"
        else:
            result["cases"][name] = found
            tight = tight or f"{int(_TIGHTER * least_bytes)}B"
        order.keep(result)
        gc.collect()
    return result


def _recorded(setup: LargeSetup, *, compiled: bool) -> tuple[Result, int]:
    """Return what a step did when, and the least budget of the model."""
    torch.manual_seed(setup.seed)
    sizes = preset(setup.model)
    model = large.random_gpt(sizes)
    shape = (setup.sequences, setup.context_tokens)
    batches = [_tokens(sizes.vocabulary, shape) for _ in range(setup.micro_batches)]
    started_s = time.perf_counter()
    with atomtrain.swap(
        model,
        batches[0],
        optimizer=lambda _: named_optimizer(model, str(setup.optimizer), setup.precision),
        device=setup.device,
        device_memory=None if setup.device == "cpu" else setup.device_memory,
        options=atomtrain.Options(
            micro_batches=setup.micro_batches,
            clip_norm=1.0,
            head_pieces="auto",
            precision=precision_of(setup.precision),
            compile=compiled,
        ),
    ) as engine:
        open_s = time.perf_counter() - started_s
        first_s = _timed(lambda: engine.step(batches))
        steps_s = [_timed(lambda: engine.step(batches)) for _ in range(setup.steps)]
        engine.recording = True
        steps_s.append(_timed(lambda: engine.step(batches)))
        assert engine.last is not None
        planner = engine.planner
        least_bytes = engine.device.reserved_bytes + least_budget_bytes(
            planner.chain, planner.costs, planner.times, planner.machine,
            Request(micro_batches=setup.micro_batches, clips=True, updates=planner.updates),
        )  # fmt: skip
        measured, predicted = engine.last_spans(), engine.predicted_spans()
        return {
            "budget_bytes": engine.device.memory_bytes,
            "open_s": open_s,
            "first_step_s": first_s,
            "steps_s": steps_s,
            "predicted_step_s": engine.plan.step_s,
            "measured_step_s": engine.last.step_s,
            "link_wait_s": engine.last.link_wait_s,
            "tokens_per_s": setup.tokens_per_step / engine.last.step_s,
            "device_peak_bytes": engine.last.device_peak_bytes,
            "predicted_device_peak_bytes": engine.plan.device_peak_bytes,
            "predicted_busy_s": _busy_s(predicted),
            "measured_busy_s": _busy_s(measured),
            "predicted_spans": list(_spans(predicted)),
            "measured_spans": list(_spans(measured)),
            "plan": engine.plan.to_json(),
        }, least_bytes


def _busy_s(spans: tuple[Span, ...]) -> dict[str, float]:
    busy = Counter[str]()
    for span in spans:
        busy[span.stream] += span.end_s - span.start_s  # type: ignore[assignment]
    return dict(busy)


def _spans(spans: tuple[Span, ...]) -> Iterator[list[Any]]:
    """Yield stream, label, begin and end in seconds since the first one began."""
    zero_s = min((span.start_s for span in spans), default=0.0)
    for one in spans:
        yield [one.stream, one.label, round(one.start_s - zero_s, 6), round(one.end_s - zero_s, 6)]


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
