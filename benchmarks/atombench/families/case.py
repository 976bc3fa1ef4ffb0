"""One family, in a process of its own: trained swapped and in an ordinary loop, and compared.

`python -m atombench.families.case FAMILY [cuda]` writes one line on standard output, a JSON object.

On a GPU both choose deterministic kernels, and all updates are the host's: a GPU rounds otherwise.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import atomtrain
from atombench.common import Result
from atombench.families.small import MOST_PARAMETERS, VOCABULARY, small_config
from atomtrain.data.sampler import Batch
from atomtrain.engine.devices.gpus import library_bytes
from atomtrain.engine.execution.determinism import deterministic
from atomtrain.engine.execution.randomness import micro_batch_seeds
from atomtrain.errors import AtomError, DeviceMemoryError, PlanError
from atomtrain.models.hugging_face import build, read_config
from atomtrain.training.setup.model_check import check_separation
from atomtrain.training.setup.objective import NextToken

MICRO_BATCHES = (1, 3, 1)
"""Of each step."""
SEQUENCES, TOKENS = 1, 13
"""Of a micro-batch. An odd number, so that nothing ends where models divide a sequence."""
ONE = "equal at 1"
"""A result: equal with one micro-batch a step, and otherwise but for the documented order in which
weights that layers share add what several micro-batches give."""
_STATE_BYTES = 16
"""Of a parameter: itself, its gradient and two moments, in float32."""
_SHARES = (0.4, 1.0, 8.0, 64.0)
"""Budgets of the device that are tried, of the whole state: activations do not become small."""
_LEAK = 1e-5
"""Share of the largest logit, above which the other document was seen; see `model_check`."""
_FOLDER = re.compile(r"\S*/site-packages/")
MicroBatch = dict[str, Tensor]


class NotBuiltError(Exception):
    """The small model cannot be built, or not be trained by an ordinary loop either."""


def measure(family: str, device: str = "cpu") -> Result:
    """Return a family's row: what `atombench.families.families` describes.

    Args:
        family: Its `model_type`.
        device: Where the ordinary loop runs: `cpu`, beside the emulated device, or `cuda`.
    """
    row: Result = {"family": family}
    library_bytes(device)  # tells cuBLAS what deterministic kernels ask for, before it begins
    try:
        with deterministic() if device == "cuda" else nullcontext():
            row |= _compared(family, device)
        row |= _packed(family, device)
    except NotBuiltError as error:
        row |= {"result": "not built", "reason": _one_line(error)}
    return row


def _model(family: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    try:
        config = small_config(family)
        with torch.device("meta"):
            outline = make(config, dtype=torch.float32)
        count = sum(parameter.numel() for parameter in outline.parameters())
        if count > MOST_PARAMETERS:
            raise NotBuiltError(f"{count} parameters are not small")
        model: nn.Module = make(config, dtype=torch.float32)
    except NotBuiltError:
        raise
    except Exception as error:  # classes of transformers may raise anything
        raise NotBuiltError(f"{type(error).__name__}: {error}") from error
    return model.train()


def _steps(counts: Sequence[int] = MICRO_BATCHES) -> list[list[MicroBatch]]:
    torch.manual_seed(1)
    steps = []
    for micro_batches in counts:
        drawn = torch.randint(3, VOCABULARY, (micro_batches * SEQUENCES, TOKENS + 1))
        batch = Batch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
        steps.append([dict(each) for each in NextToken().micro_batches(batch, SEQUENCES)])
    return steps


def _loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    return NextToken().loss(model(input_ids=batch["input_ids"]), batch)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


class _Reference:
    """An ordinary loop with gradient accumulation, and what it ends with.

    Where input and output embeddings are one weight, it adds what the output embeddings give it in
    all micro-batches of a step before what the input embeddings give: the order of additions that
    the docs tell of swapped training. For that the input embeddings have a parameter of their own
    with the same memory.
    """

    def __init__(self, model: Any, steps: Sequence[Sequence[MicroBatch]], device: str) -> None:
        self.model = copy.deepcopy(model).to(device)
        self.device = device
        self.names = {name: p for name, p in self.model.named_parameters()}
        self.host = {
            name: nn.Parameter(p.detach().to("cpu", copy=True), p.requires_grad)
            for name, p in self.names.items()
        }
        self.optimizer = _optimizer(list(self.host.values()))
        self._alias: nn.Parameter | None = None
        self._shared = _tied_weight(self.model)
        if self._shared is not None:
            self._alias = nn.Parameter(self._shared.data)
            self.model.get_input_embeddings().weight = self._alias
        steps = [[_to(batch, device) for batch in step] for step in steps]
        seeded = _draws(self.model, steps[0][0])
        torch.manual_seed(2)
        self.losses = [self._step(step, seeded and len(step) > 1) for step in steps]
        self.random_state = torch.get_rng_state()
        self.model.eval()
        with torch.no_grad():
            losses = [float(_loss(self.model, each)) for each in steps[1]]
        self.evaluation = sum(losses) / len(losses)

    def _step(self, step: Sequence[MicroBatch], seeded: bool) -> float:
        seeds = micro_batch_seeds(len(step)) if seeded else []
        after = _random_states(self.device)
        losses, of_inputs = [], []
        for index, batch in enumerate(step):
            if seeded:
                torch.manual_seed(seeds[index])
            loss = _loss(self.model, batch)
            (loss / len(step)).backward()
            losses.append(float(loss.detach()))
            if self._alias is not None:
                of_inputs.append(self._alias.grad)
                self._alias.grad = None
        for gradient in of_inputs:
            assert self._shared is not None
            if gradient is not None:
                assert self._shared.grad is not None
                self._shared.grad += gradient
        if seeded:
            torch.set_rng_state(after[0])
            if self.device == "cuda":
                torch.cuda.set_rng_state(after[1])
        for name, parameter in self.names.items():
            gradient = parameter.grad
            self.host[name].grad = None if gradient is None else gradient.cpu()
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.names.items():
                parameter.copy_(self.host[name])
                parameter.grad = None
        return sum(losses) / len(step)

    def state(self) -> dict[str, Tensor]:
        """Return parameters, buffers and moments by name."""
        state = _to(self.model.state_dict(), "cpu")
        for name, parameter in self.host.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{name}:{key}"] = torch.as_tensor(value)
        return state


def _to(values: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in values.items()}


def _random_states(device: str | torch.device) -> list[Tensor]:
    """Return the state of the host's generator, and of the GPU's where there is one."""
    gpu = torch.device(device).type == "cuda"
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if gpu else [])]


def _tied_weight(model: Any) -> nn.Parameter | None:
    """Return the weight that input and output embeddings share, if they do."""
    output = model.get_output_embeddings()
    weight: nn.Parameter | None = getattr(output, "weight", None)
    inputs = model.get_input_embeddings()
    return weight if weight is not None and getattr(inputs, "weight", None) is weight else None


def _draws(model: nn.Module, batch: MicroBatch) -> bool:
    """Return whether a training step draws random numbers."""
    device = next(model.parameters()).device
    before = _random_states(device)
    with torch.no_grad():
        _loss(copy.deepcopy(model), batch)
    after = _random_states(device)  # whoever asks seeds again
    return any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))


def _compared(family: str, device: str) -> Result:
    """Compare with several micro-batches, and with one if shared weights then add otherwise."""
    row = _at(family, MICRO_BATCHES, device)
    shared = row.pop("shared", None)
    if row["result"] == "differs" and shared is not None:
        again = _at(family, [1] * len(MICRO_BATCHES), device)
        again.pop("shared", None)
        if again["result"] == "equal":
            reason = f"with several micro-batches, {shared}, which layers share, adds otherwise"
            return {**again, "result": ONE, "reason": reason}
    return row


def _at(family: str, counts: Sequence[int], device: str) -> Result:
    model = _model(family)
    steps = _steps(counts)
    try:
        reference = _Reference(model, steps, device)
    except Exception as error:  # as above
        raise NotBuiltError(f"{type(error).__name__}: {error}") from error
    if not torch.isfinite(torch.tensor(reference.losses)).all():
        raise NotBuiltError("the ordinary loop's loss is not finite")
    start = copy.deepcopy(model)
    try:
        row = _swapped(model, steps, reference, device)
    except DeviceMemoryError as error:  # its plan said that it fits
        return {"result": "failed", "reason": _one_line(error)}
    except AtomError as error:
        return {"result": "refused", "reason": _one_line(error)}
    except Exception as error:  # noqa: BLE001 (is what this benchmark is to find)
        traceback.print_exc()
        return {"result": "failed", "reason": f"{type(error).__name__}: {_one_line(error)}"}
    if row["result"] == "differs":
        again = _Reference(start, steps, device)
        if first_difference(reference.state(), again.state()) is not None:
            raise NotBuiltError("the ordinary loop gives other bits each time")
    return row


def _swapped(
    model: nn.Module, steps: Sequence[Sequence[MicroBatch]], reference: _Reference, device: str
) -> Result:
    engine, share = _engine(model, steps[0][0], device)
    torch.manual_seed(2)
    with engine:
        losses = [engine.step(step) for step in steps]
        random_state = torch.get_rng_state()
        found = dict(engine.state_dict())
        for name, moments in engine.optimizer_state().items():
            found |= {f"{name}:{key}": torch.as_tensor(value) for key, value in moments.items()}
        differing = first_difference(reference.state(), found)
        if not torch.equal(random_state, reference.random_state):
            differing = differing or "the random state"
        wrong = [index for index, loss in enumerate(losses) if loss != reference.losses[index]]
        if wrong:
            told = losses[wrong[0]], reference.losses[wrong[0]]
            differing = f"the loss of step {wrong[0]} ({told[0]}, not {told[1]})"
        try:
            evaluated = engine.evaluate(steps[1]) == reference.evaluation
            evaluation = "equal" if evaluated else "differs"
        except AtomError as error:
            evaluation = _one_line(error)
        shared = _shared(model, engine)
    row = {"result": "equal", "budget_share": round(share, 3), "evaluation": evaluation}
    if differing is not None:
        row |= {"result": "differs", "reason": differing, "shared": shared}
    return row


def _shared(model: nn.Module, engine: atomtrain.Engine) -> str | None:
    """Return a weight that layers share, other than that of input and output embeddings."""
    tied = _tied_weight(model)
    users = engine.traced.chain.users
    for name, parameter in model.named_parameters():
        if parameter is not tied and len(users[id(parameter)]) > 1:
            return name
    return None


def _engine(model: nn.Module, example: MicroBatch, device: str) -> tuple[atomtrain.Engine, float]:
    """Return an engine with the least of the budgets that are tried, as a share of the state."""
    state_bytes = _STATE_BYTES * sum(parameter.numel() for parameter in model.parameters())
    on_gpu = device == "cuda"
    options = atomtrain.Options(
        micro_batches=max(MICRO_BATCHES),
        optimizer_on_device=False,
        host_layers=0 if on_gpu else None,
        deterministic=on_gpu,
        profile=False,
    )
    for share in _SHARES:
        try:
            engine = atomtrain.swap(
                model, example, optimizer=_optimizer,
                device="cuda" if on_gpu else "emulated:4GiB/s",
                device_memory=int(share * state_bytes) + library_bytes(device),
                loss=NextToken().loss, options=options,
            )  # fmt: skip
            return engine, share
        except PlanError:
            if share == _SHARES[-1]:
                raise
    raise AssertionError


def first_difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str | None:
    """Return the name of the first tensor that is not the same bit for bit, `None` if all are."""
    for name, tensor in expected.items():
        if name not in found or not _same_bits(tensor, found[name]):
            return name
    return next((name for name in found if name not in expected and ":" in name), None)


def _same_bits(one: Tensor, two: Tensor) -> bool:
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    left, right = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, two))
    return torch.equal(left, right)


def _packed(family: str, device: str) -> Result:
    """Return what `atom train --packing` says of it, and what is seen of another document."""
    with tempfile.TemporaryDirectory(prefix="atom-families-") as folder:
        small_config(family).save_pretrained(folder)
        try:
            sizes = read_config(Path(folder))
            with torch.device("meta"):
                outline = build(sizes)
            check_separation(family, sizes, outline)
        except AtomError as error:
            return {"packing": "refused", "packing_reason": _one_line(error)}
    try:
        seen = _seen(_model(family).eval().to(device))
    except Exception as error:  # noqa: BLE001 (as above)
        return {"packing": "accepted", "packing_reason": f"{type(error).__name__}: {error}"}
    return {"packing": "leaks" if seen > _LEAK else "accepted", "packing_seen": seen}


def _seen(model: nn.Module) -> float:
    """Return how far a packed document differs from the same one alone, of its largest logit.

    Weights of another kind than those of `check_separation`: wide, so that all that passes shows.
    """
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        lengths = (7, 9, 5)
        texts = [torch.randint(3, VOCABULARY, (1, length)) for length in lengths]
        documents = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
        ids = torch.cat(texts, 1)
        packed = _logits(model, Batch(ids, ids, documents=documents))
        most, begin = 0.0, 0
        for text in texts:
            alone = _logits(model, Batch(text, text, documents=text * 0))
            part = packed[:, begin : begin + text.shape[1]]
            most = max(most, float((part - alone).abs().max() / alone.abs().max()))
            begin += text.shape[1]
    return most


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    there = str(next(model.parameters()).device)
    logits: Tensor = model(**_to(NextToken().inputs(batch), there)).logits
    return logits


def _one_line(error: BaseException) -> str:
    return told(str(error))


def told(text: str) -> str:
    """Return what was said in one line, without where packages lie on this machine."""
    return " ".join(_FOLDER.sub("", text).split())[:400]


def main(arguments: Sequence[str]) -> int:
    """Measure the named family, on the device that may be named behind it."""
    # Libraries print what they like; the row has a descriptor of its own.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from transformers import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    row = measure(*arguments)
    replies.write(json.dumps(row) + "\n")
    replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
