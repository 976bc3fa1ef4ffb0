"""The contenders of the benchmark `offloaders`, each in its own library's way, and what they train.

All train `model_of` a case with AdamW on the same stream of batches, and take a step's loss as the
mean over its micro-batches: in float32, but for `atom-bf16-int8`. `OPEN` has them by name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from atombench.common import require_positive
from atomtrain.models import GPT, GPTConfig

MicroBatches = list[dict[str, Tensor]]
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1
_HEAD_WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class OffloadCase:
    """Inputs of the benchmark."""

    layers: int = 8
    """Blocks of the GPT."""
    width: int = 512
    """A multiple of 64."""
    vocabulary: int = 4096
    sequence_tokens: int = 256
    sequences: int = 8
    """Sequences of a step, of all its micro-batches."""
    rounds: int = 9
    """Rounds in which each contender has its turn; at least 1."""
    turn_steps: int = 2
    """Counted steps of a turn; at least 1."""
    search_turns: int = 4
    """Turns of one counted step by which a contender's setting is chosen; at least 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all micro-batches."""
        return self.sequences * self.sequence_tokens


CASE = OffloadCase()
CUDA_CASE = OffloadCase(
    layers=24, width=2048, vocabulary=32000, sequence_tokens=1024, sequences=16, rounds=5
)
QUICK = OffloadCase(
    layers=3, width=128, vocabulary=512, sequence_tokens=64, sequences=4, rounds=2, search_turns=1
)


def model_of(case: OffloadCase) -> GPT:
    """Return the model, with the same weights in every process.

    The head is not tied to the embedding, since offloaders treat shared weights differently.
    """
    torch.manual_seed(case.seed)
    model = GPT(
        GPTConfig(
            layers=case.layers,
            width=case.width,
            heads=max(1, case.width // _HEAD_WIDTH),
            head_width=min(case.width, _HEAD_WIDTH),
            vocabulary=case.vocabulary,
            context=case.sequence_tokens,
        )
    )
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def step_data(case: OffloadCase, step: int, micro_batches: int) -> MicroBatches:
    """Return a step's tokens in so many micro-batches; on the CPU."""
    generator = torch.Generator().manual_seed(case.seed + 1 + step)
    shape = (case.sequences, case.sequence_tokens + 1)
    tokens = torch.randint(case.vocabulary, shape, generator=generator)
    return [
        {"input_ids": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()}
        for part in tokens.chunk(micro_batches)
    ]


class Order(NamedTuple):
    """What a contender is asked to do."""

    case: OffloadCase
    device: str
    """`cpu` or `cuda`."""
    device_memory: str | None
    """Budget on a GPU."""
    micro_batches: int
    settings: Mapping[str, Any]
    """The contender's own."""

    def data(self, step: int) -> MicroBatches:
        """Return a step's micro-batches."""
        return step_data(self.case, step, self.micro_batches)


class Contender(Protocol):
    """Something that trains."""

    def step(self, micro_batches: MicroBatches) -> float:
        """Run one optimizer step; return the mean loss."""
        ...

    def finish(self) -> None:
        """Block until all work is done."""
        ...


class _Loop:
    """The usual loop around a model that looks like any other."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device

    def step(self, micro_batches: MicroBatches) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        losses = []
        for micro_batch in micro_batches:
            loss = _loss(self._model, micro_batch, self._device)
            (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        self._optimizer.step()
        return sum(float(loss) for loss in losses) / len(losses)

    def finish(self) -> None:
        _synchronize(self._device)


def open_resident(order: Order) -> Contender:
    """Return ordinary training: everything in one memory."""
    model = model_of(order.case).to(order.device)
    return _Loop(model, _adamw(model.parameters()), order.device)


def open_atom(
    order: Order, make: Callable[[Any], torch.optim.Optimizer] | None = None, **options: Any
) -> Contender:
    """Return ATOM, by default in float32; without a GPU the host is its own device."""
    import atomtrain

    class Atom:
        """The engine as a contender."""

        def __init__(self) -> None:
            self._engine = atomtrain.swap(
                model_of(order.case),
                order.data(0)[0],
                optimizer=make or _adamw,
                device=order.device,
                device_memory=order.device_memory,
                # As the others do.
                options=atomtrain.Options(
                    micro_batches=order.micro_batches, compile=False, **options, **order.settings
                ),
            )

        def step(self, micro_batches: MicroBatches) -> float:
            return self._engine.step(micro_batches)

        def finish(self) -> None:
            self._engine.synchronize()

    return Atom()


def open_narrow_atom(order: Order) -> Contender:
    """Return ATOM in bfloat16, with exact split masters and moments in 8 bits."""
    from atomtrain.optimizers import AdamW

    def narrow(parameters: Any) -> torch.optim.Optimizer:
        return AdamW(
            parameters, LEARNING_RATE, weight_decay=WEIGHT_DECAY, state="int8", master="split"
        )

    return open_atom(order, narrow, precision="bf16")


def open_fsdp2(order: Order) -> Contender:
    """Return PyTorch's fully sharded data parallelism of one rank, offloaded to the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _alone("cpu:gloo,cuda:nccl" if order.device == "cuda" else "gloo")
    mesh = init_device_mesh(order.device, (1,))
    policy = CPUOffloadPolicy(pin_memory=order.device == "cuda")
    model = model_of(order.case)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, offload_policy=policy, **order.settings)
    return _Loop(model, _adamw(model.parameters()), order.device)


def open_deepspeed(order: Order) -> Contender:
    """Return ZeRO of stage 3 with parameters and optimizer on the CPU.

    The first run compiles the optimizer.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone)
    os.environ.setdefault("MASTER_PORT", "0")
    os.environ["DS_ACCELERATOR"] = order.device
    import deepspeed

    offload = {"device": "cpu", "pin_memory": order.device == "cuda"}
    sequences = order.case.sequences // order.micro_batches
    config = {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_accumulation_steps": order.micro_batches,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            **order.settings,
        },
        "steps_per_print": 1 << 30,
    }
    _alone("nccl" if order.device == "cuda" else "gloo")
    model = model_of(order.case)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )

    class DeepSpeed:
        """Its engine as a contender."""

        def step(self, micro_batches: MicroBatches) -> float:
            losses = []
            for micro_batch in micro_batches:
                loss = _loss(engine, micro_batch, order.device)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            return sum(float(loss) for loss in losses) / len(losses)

        def finish(self) -> None:
            _synchronize(order.device)

    return DeepSpeed()


OPEN: dict[str, Callable[[Order], Contender]] = {
    "atom": open_atom,
    "atom-bf16-int8": open_narrow_atom,
    "deepspeed": open_deepspeed,
    "fsdp2": open_fsdp2,
    "resident": open_resident,
}


def _alone(backend: str) -> None:
    """Make the process group of one rank that both libraries want, once."""
    if not torch.distributed.is_initialized():
        meeting = f"file://{tempfile.mkdtemp()}/store"
        torch.distributed.init_process_group(backend, init_method=meeting, rank=0, world_size=1)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def _loss(model: Any, micro_batch: Mapping[str, Tensor], device: str) -> Tensor:
    loss: Tensor = model(**{name: value.to(device) for name, value in micro_batch.items()}).loss
    return loss


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
