"""Continues prompts with a model on the host that runs on a device, whole or block by block."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.engine.devices.device import Device
from atomtrain.engine.generation.predicting import (
    Predictor,
    context_of,
    padded,
    require_language_model,
    vocabulary_of,
)
from atomtrain.engine.generation.streaming import Streamed
from atomtrain.errors import ConfigError, DataError, DeviceMemoryError, nearest
from atomtrain.progress import Progress
from atomtrain.settings import check_seed
from atomtrain.units import format_bytes

_MARGIN = 16
"""This part of the budget is left to the allocator, which cannot fill every gap."""


class Generated(NamedTuple):
    """What was generated, and how."""

    tokens: list[list[int]]
    """Of each prompt: what follows it, without the token at which it stopped."""
    texts: list[str] | None
    """The same, decoded; `None` without a tokenizer."""
    tokens_per_s: float
    """Of all prompts together, reading the prompts included."""
    resident: bool
    """Whether the whole model lay on the device in the end, not block by block."""
    peak_device_bytes: int
    """Most device memory in use; 0 where the device is the host itself."""


class Wish(NamedTuple):
    """How to continue prompts."""

    max_new_tokens: int = 100
    """Of each prompt."""
    temperature: float = 0.8
    """0 takes the likeliest token."""
    seed: int | Sequence[int] = 0
    """Of the random choices of each prompt, which do not depend on the others; or one for each."""
    stop: Collection[int] = ()
    """Tokens that end a text."""
    context: int | None = None
    """Tokens that the model looks back at most; `None`: as its configuration says."""
    max_s: float | None = None
    """Seconds after which no further token is begun; `None`: no limit."""

    def check(self) -> None:
        """Raise a `ConfigError` if something in it cannot be."""
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature must be 0 or more, not {self.temperature:g}")
        for seed in [self.seed] if isinstance(self.seed, int) else self.seed:
            check_seed("seed", seed)

    def seeds(self, prompts: int) -> Sequence[int]:
        """Return the seed of each prompt."""
        seeds = [self.seed] * prompts if isinstance(self.seed, int) else self.seed
        if len(seeds) != prompts:
            raise ConfigError(f"give one seed, or one for each of {prompts} prompts")
        return seeds


def wish_of(given: Mapping[str, Any]) -> Wish:
    """Return a wish by the names of its fields.

    Raises:
        ConfigError: it has no such field, or something in it cannot be.
    """
    for name in given:
        if name not in Wish._fields:
            raise ConfigError(f"generate takes no {name!r}.{nearest(name, Wish._fields)}")
    wish = Wish(**given)
    wish.check()
    return wish


def encoded(prompts: Sequence[Sequence[int] | str], tokenizer: Any) -> list[list[int]]:
    """Return the token ids of prompts, of which some may be texts.

    Raises:
        ConfigError: a text without a tokenizer, or one text in place of a list.
    """
    if isinstance(prompts, str):
        raise ConfigError("give a list of prompts, not one text: generate([text])")
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("prompts are texts; give tokenizer=..., or token ids")
    return [
        list(tokenizer.encode(prompt)) if isinstance(prompt, str) else [int(i) for i in prompt]
        for prompt in prompts
    ]


def decoded(found: Generated, tokenizer: Any) -> Generated:
    """Return the same with texts, if there is a tokenizer."""
    if tokenizer is None:
        return found
    return found._replace(texts=[tokenizer.decode(tokens) for tokens in found.tokens])


def check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int | None) -> None:
    """Refuse what no text can begin with.

    Raises:
        ConfigError: there is no prompt, one is empty, or has a token that the model does not know.
    """
    if not prompts:
        raise ConfigError("there is no prompt; give at least one")
    for number, prompt in enumerate(prompts, 1):
        if not len(prompt):
            raise ConfigError(f"prompt {number} is empty; give at least one token")
        wrong = [token for token in prompt if token < 0 or (vocabulary and token >= vocabulary)]
        if wrong:
            raise ConfigError(
                f"prompt {number} has the token {wrong[0]}; the model knows 0 to "
                f"{(vocabulary or 2**31) - 1}"
            )


def generate(
    model: nn.Module, device: Device, prompts: Sequence[Sequence[int]], wish: Wish
) -> Generated:
    """Return what follows each prompt.

    Blocks of the model stay on the device as far as they fit beside what the prompts need, which
    is measured when they are read; the others are loaded for each token.

    Args:
        model: On the host, in evaluation mode.
        device: Where it runs; must not hold the model already.
        prompts: Token ids, of any lengths.
        wish: How to continue them.

    Raises:
        ConfigError: not a language model, no prompts, or numbers that cannot be.
        PlanError: embedding, head and two blocks do not fit the budget.
        DeviceMemoryError: the prompts with all their new tokens need more than the budget.
        DataError: what the model gives is not a number.
    """
    wish.check()
    require_language_model(model)
    check_prompts(prompts, vocabulary_of(model))
    seeds = wish.seeds(len(prompts))
    started_s = time.perf_counter()
    with _placed(model, device) as streamed:
        try:
            found = _continued(model, device, streamed, prompts, wish, seeds)
        except DeviceMemoryError as error:
            raise DeviceMemoryError(
                f"{len(prompts)} prompts of up to {max(map(len, prompts))} tokens, each with "
                f"{wish.max_new_tokens} new ones, do not fit the device budget of "
                f"{format_bytes(device.memory_bytes)}, though the model runs block by block; give "
                "fewer or shorter prompts, ask for fewer tokens, or raise --device-memory"
            ) from error
        resident = streamed is None or streamed.resident
        taken_s = time.perf_counter() - started_s
        peak_bytes = device.peak_bytes()
    number = sum(len(tokens) for tokens in found)
    return Generated(found, None, number / taken_s, resident, peak_bytes)


@contextmanager
def _placed(model: nn.Module, device: Device) -> Iterator[Streamed | None]:
    """Have the model on the device; `None` where that is the host itself."""
    if device.one_memory:
        yield None
        return
    streamed = Streamed(model, device)
    with device.computing():
        with streamed:
            yield streamed
        del streamed
    device.trim()


def _continued(
    model: nn.Module,
    device: Device,
    streamed: Streamed | None,
    prompts: Sequence[Sequence[int]],
    wish: Wish,
    seeds: Sequence[int],
) -> list[list[int]]:
    context = wish.context or context_of(model)
    at = device.torch_device
    if len({len(prompt) for prompt in prompts}) > 1 and not Predictor(model, context, at).pads:
        pairs = zip(prompts, seeds, strict=True)
        return [_continued(model, device, streamed, [p], wish, [s])[0] for p, s in pairs]
    predict = Predictor(model, context, at)
    ids, padding = padded(prompts)
    if context is not None and ids.shape[1] > context:
        cut = ids.shape[1] - context
        ids, padding = ids[:, cut:], None if padding is None else (padding - cut).clamp(min=0)
    length = ids.shape[1]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    tokens: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(prompts)))
    started_s = time.monotonic()
    static_bytes = _in_use(device)
    with Progress("generating", wish.max_new_tokens, "tokens") as progress:
        while going:
            last = predict(ids, padding)
            if streamed is not None and ids.shape[1] == length:
                _keep(device, streamed, static_bytes, 1 + wish.max_new_tokens / length)
            with device.on_host():
                chosen = _chosen(last.cpu(), wish.temperature, generators)
                del last
                ids = torch.cat([ids, chosen[:, None]], 1)
            for row in tuple(going):
                token = int(chosen[row])
                if token in wish.stop:
                    going.discard(row)
                    continue
                tokens[row].append(token)
                if len(tokens[row]) == wish.max_new_tokens:
                    going.discard(row)
            progress.advance()
            if wish.max_s is not None and time.monotonic() - started_s > wish.max_s:
                break
    return tokens


def _in_use(device: Device) -> int:
    device.synchronize()
    device.reset_peak()
    return device.peak_bytes()


def _keep(device: Device, streamed: Streamed, static_bytes: int, growth: float) -> None:
    """Let blocks stay where memory is left beside what the prompts took, as it will have grown.

    All that reading the prompts took is counted as if it grew with their length, which is more than
    what a cache and a forward of one token take.
    """
    device.synchronize()
    taken_bytes = math.ceil((device.peak_bytes() - static_bytes) * growth)
    budget_bytes = device.memory_bytes - device.reserved_bytes - device.memory_bytes // _MARGIN
    streamed.keep(budget_bytes - static_bytes - taken_bytes)


def _chosen(last: Tensor, temperature: float, generators: Sequence[torch.Generator]) -> Tensor:
    """Return the next token of each row of `[B, V]` logits, `[B]` int64."""
    if bool(last.isnan().any()) or not bool(last.isfinite().any(-1).all()):
        raise DataError(
            "the model's output is not a number; its weights are damaged: give another "
            "checkpoint, or a whole copy of the model"
        )
    if temperature == 0:
        return last.argmax(-1)
    wide = last if last.element_size() >= 4 else last.float()
    weights = torch.softmax(wide / temperature, -1)
    rows = zip(weights, generators, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=one) for row, one in rows])
