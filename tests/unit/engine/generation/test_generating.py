"""Continued prompts: what is kept changes nothing, prompts do not meet, mistakes are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.generation.generating import Generated, Wish, generate
from atomtrain.errors import AtomError, ConfigError, DataError, DeviceMemoryError, PlanError
from atomtrain.models import GPT, GPTConfig
from tests.support.engine_models import adamw, square
from tests.support.engine_models import gpt as small_gpt
from tests.support.engine_models import tokens as some_tokens

CONTEXT = 12


@pytest.fixture
def model() -> GPT:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        config = GPTConfig(
            layers=3, width=32, heads=2, head_width=16, vocabulary=97, context=CONTEXT, dropout=0.5
        )
        model = GPT(config)
        for parameter in model.parameters():  # as drawn, all tokens are nearly as likely
            parameter.data.mul_(4)
        return model.double().eval()


def written(
    model: nn.Module, prompts: Sequence[Sequence[int]], device: str = "cpu",
    memory: int | None = None, **wish: Any,
) -> Generated:  # fmt: skip
    with closing(open_device(device, memory)) as opened:
        return generate(model, opened, prompts, Wish(**wish))


def whole(model: GPT, prompt: Sequence[int], tokens: int) -> Iterator[int]:
    """Compute everything anew for each token."""
    ids = torch.tensor(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(ids[None, -CONTEXT:]).logits
        ids = torch.cat([ids, logits[0, -1:].argmax(-1)])
        yield int(ids[-1])


def prompt_of(length: int) -> list[int]:
    return [place * 7 % 97 for place in range(length)]


@pytest.mark.parametrize("length", [1, 5, CONTEXT, CONTEXT + 3])
def test_the_likeliest_tokens_are_those_of_the_whole_text(model: GPT, length: int) -> None:
    """Also where the text grows past the context."""
    found = written(model, [prompt_of(length)], max_new_tokens=2 * CONTEXT, temperature=0)
    expected = list(whole(model, prompt_of(length), 2 * CONTEXT))
    assert len(set(expected)) > 3
    assert found.tokens == [expected]
    assert found.resident
    assert found.peak_device_bytes == 0


def test_within_the_context_each_token_is_computed_once(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    continued = GPT.continued

    def counted(self: GPT, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return continued(self, ids, *arguments)

    monkeypatch.setattr(GPT, "continued", counted)
    written(model, [prompt_of(4)], max_new_tokens=2 * CONTEXT)
    kept = CONTEXT - 4
    assert lengths == [4] + [1] * kept + [CONTEXT] * (2 * CONTEXT - 1 - kept)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_prompts_of_unlike_length_do_not_meet(model: GPT, temperature: float) -> None:
    """Also past the context, which the longest reaches first."""
    prompts = [prompt_of(length) for length in (5, 1, CONTEXT + 3, 5)]
    wish = {"max_new_tokens": 2 * CONTEXT, "temperature": temperature, "seed": 5}
    together = written(model, prompts, **wish).tokens
    assert together == [written(model, [prompt], **wish).tokens[0] for prompt in prompts]


class Plain(nn.Module):
    """Takes no mask and keeps nothing: the next token is the sum of those so far."""

    def forward(self, input_ids: torch.Tensor) -> Any:
        sums = input_ids.cumsum(1) % 50
        return GPTLike(nn.functional.one_hot(sums, 50).double())


class GPTLike:
    def __init__(self, logits: torch.Tensor | None) -> None:
        self.logits = logits


def test_a_model_without_a_mask_takes_prompts_one_by_one() -> None:
    found = written(Plain(), [[1, 2], [3]], max_new_tokens=3, temperature=0)
    assert found.tokens == [[3, 6, 12], [3, 6, 12]]


def test_texts_stop_and_seeds_differ(model: GPT) -> None:
    prompts = [prompt_of(3)] * 2
    (first, second) = written(model, prompts, max_new_tokens=8, seed=[1, 2]).tokens
    assert first != second
    again = written(model, prompts, max_new_tokens=8, seed=[1, 2], stop=(first[2],)).tokens
    assert again[0] == first[: first.index(first[2])]
    assert len(again[1]) == 8 or first[2] in second


class Silent(Plain):
    def forward(self, input_ids: torch.Tensor) -> Any:
        return GPTLike(None)


class Broken(Plain):
    def forward(self, input_ids: torch.Tensor) -> Any:
        return GPTLike(torch.full((*input_ids.shape, 50), torch.nan))


MISTAKES: dict[str, tuple[Callable[[GPT], object], type[AtomError], str]] = {
    "no prompt": (lambda m: written(m, []), ConfigError, "no prompt; give at least one"),
    "empty": (lambda m: written(m, [[1], []]), ConfigError, "prompt 2 is empty"),
    "token": (lambda m: written(m, [[97]]), ConfigError, "knows 0 to 96"),
    "temperature": (lambda m: written(m, [[1]], temperature=-1), ConfigError, "0 or more, not -1"),
    "nan": (lambda m: written(m, [[1]], temperature=float("nan")), ConfigError, "not nan"),
    "tokens": (lambda m: written(m, [[1]], max_new_tokens=0), ConfigError, "at least 1, not 0"),
    "seed": (lambda m: written(m, [[1]], seed=-1), ConfigError, "seed must be 0"),
    "seeds": (lambda m: written(m, [[1]], seed=[1, 2]), ConfigError, "one for each of 1 prompts"),
    "linear": (lambda _: written(nn.Linear(2, 2), [[1]]), ConfigError, "not a language model"),
    "no logits": (lambda _: written(Silent(), [[1]]), ConfigError, "output has no logits"),
    "no number": (lambda _: written(Broken(), [[1]]), DataError, "is not a number"),
    "budget": (lambda m: written(m, [[1]], "emulated", 100 << 10), PlanError, "raise --device-mem"),
    "prompts": (
        lambda m: written(m, [prompt_of(9)] * 50, "emulated", 500 << 10),
        DeviceMemoryError,
        "fewer or shorter prompts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(model: GPT, mistake: str) -> None:
    call, kind, words = MISTAKES[mistake]
    with pytest.raises(kind, match=words):
        call(model)


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)


def engine_of(model: nn.Module, device: str = "emulated", memory: str | None = None) -> Any:
    return atomtrain.swap(
        model, some_tokens(), optimizer=adamw, device=device, device_memory=memory,
        options=atomtrain.Options(profile=False),
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_an_engine_writes_between_two_steps_and_trains_on_as_if_it_had_not(device: str) -> None:
    losses: list[list[float]] = []
    for writes in (False, True):
        torch.manual_seed(3)
        with engine_of(small_gpt(dropout=0.3), device) as engine:
            losses.append([engine.step([some_tokens()])])
            if writes:
                found = engine.generate(["abc", "z"], tokenizer=Letters(), max_new_tokens=4)
                assert [len(text) for text in found.texts or []] == [4, 4]
                with pytest.raises(ConfigError, match="is empty"):
                    engine.generate([[]])
                assert engine.model.training
                on_host = engine.generate([[0, 1, 2], [25]], max_new_tokens=4, on_host=True)
                assert on_host.tokens == found.tokens
            losses[-1] += [engine.step([some_tokens()]) for _ in range(2)]
    assert losses[0] == losses[1]


ENGINE_MISTAKES = {
    "give a list of prompts": lambda engine: engine.generate("abc"),
    "give tokenizer=": lambda engine: engine.generate(["abc"]),
    "Did you mean 'temperature'": lambda engine: engine.generate([[1]], temprature=0),
}


def test_mistakes_leave_an_engine_as_it_was() -> None:
    with engine_of(small_gpt()) as engine:
        for words, call in ENGINE_MISTAKES.items():
            with pytest.raises(ConfigError, match=words):
                call(engine)
        engine.step([some_tokens()])
    with pytest.raises(ConfigError, match="closed"):
        engine.generate([[1]])


def test_prompts_that_do_not_fit_leave_a_small_engine_as_it_was() -> None:
    """What the failure still holds must not take the place of the engine's own memory."""
    losses: list[list[float]] = []
    for writes in (False, True):
        torch.manual_seed(3)
        batches = [some_tokens() for _ in range(3)]
        with engine_of(small_gpt(layers=4), memory="80KiB") as engine:
            losses.append([])
            for batch in batches:
                losses[-1].append(engine.step([batch]))
                if writes:
                    with pytest.raises(DeviceMemoryError, match="do not fit the device budget"):
                        engine.generate([[1] * 16] * 40, max_new_tokens=2)
    assert losses[0] == losses[1]


def test_another_model_than_of_language_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with atomtrain.swap(
        model, torch.zeros(2, 4), optimizer=adamw, loss=square, device="cpu",
        options=atomtrain.Options(profile=False),
    ) as engine, pytest.raises(ConfigError, match="not a language model"):  # fmt: skip
        engine.generate([[1]])
