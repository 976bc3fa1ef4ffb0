"""Text of a model that is streamed: the bits of the resident one, within the budget."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.generation.generating import Wish, generate
from atomtrain.engine.generation.predicting import Predictor, padded
from atomtrain.engine.generation.streaming import Streamed, gather
from atomtrain.models import GPT, GPTConfig

VOCABULARY, TOKENS = 61, 8
PROMPTS = [[5, 7, 11], [1], [60, 3, 4, 8]]
WIDTHS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}


def gpt() -> nn.Module:
    return GPT(
        GPTConfig(
            layers=8, width=64, heads=4, head_width=16, vocabulary=VOCABULARY, context=32,
            dropout=0.1,
        )
    )  # fmt: skip


def hugging_face(name: str, **config: Any) -> nn.Module:
    import transformers

    made = getattr(transformers, f"{name}Config")(**WIDTHS, **config)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(made)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "llama": functools.partial(hugging_face, "Llama", tie_word_embeddings=True),
    "mixture": functools.partial(hugging_face, "Qwen3Moe", **EXPERTS),
    "state space": functools.partial(hugging_face, "Jamba", mamba_dt_rank=8, num_experts=4),
    "linear attention": functools.partial(
        hugging_face, "Qwen3Next", **EXPERTS, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, shared_expert_intermediate_size=32,
    ),
}  # fmt: skip


@functools.cache
def model_of(name: str) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        model = MODELS[name]().eval()
        for parameter in model.parameters():  # as drawn, all tokens are nearly as likely
            parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    return model


def logits_of(model: nn.Module, device: Any, streamed: Streamed | None) -> list[Tensor]:
    """Return the logits of `TOKENS` likeliest tokens of all prompts."""
    predict, found = Predictor(model, 32, device.torch_device), []
    ids, padding = padded(PROMPTS)
    with ExitStack() as stack:
        stack.enter_context(device.computing())
        stack.enter_context(streamed or nullcontext())
        for _ in range(TOKENS):
            found.append(predict(ids, padding).clone())
            ids = torch.cat([ids, found[-1].argmax(-1, keepdim=True)], 1)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_streamed_logits_have_the_bits_of_resident_ones(name: str) -> None:
    """And prompts of unlike length get the tokens that each gets alone."""
    chance = random.Random(4)
    model = model_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with closing(open_device("cpu")) as host:
        expected = logits_of(model, host, None)
        alone = [generate(model, host, [prompt], Wish(TOKENS, 0.0)).tokens[0] for prompt in PROMPTS]
    device = EmulatedDevice(1 << 30, 1e12, lambda _: time.sleep(chance.choice((0, 0, 2e-4))))
    with closing(device):
        found = logits_of(model, device, Streamed(model, device))
        assert device.peak_bytes() < sum(p.nbytes for p in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.stack([one.argmax(-1) for one in expected], 1).tolist() == alone
    assert len({token for row in alone for token in row}) > 3
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize("name", MODELS)
def test_each_token_is_computed_once(name: str) -> None:
    model = model_of(name)
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    lengths: list[int] = []
    hook = embedding.register_forward_hook(lambda *of: lengths.append(of[1][0].shape[1]))
    with closing(open_device("cpu")) as host:
        generate(model, host, PROMPTS, Wish(3, 0.0))
    hook.remove()
    assert lengths == [4, 1, 1]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_as_much_of_a_model_stays_as_fits(precision: torch.dtype) -> None:
    """The emulated device refuses each byte above the budget, and its peak is that of all."""
    model = gpt().to(precision).eval()
    all_bytes = sum(parameter.nbytes for parameter in model.parameters())
    wish, seen, copied = Wish(TOKENS, 0.0), {}, {}
    with closing(open_device("cpu")) as host:
        expected = generate(model, host, PROMPTS, wish).tokens
    for share in (0.5, 0.9, 3.0):
        with closing(EmulatedDevice(int(share * all_bytes), 1e12)) as device:
            copies: list[int] = []
            copy_in = device.copy_in

            def counted(
                target: Tensor, source: Tensor, copy: Any = copy_in, sizes: list[int] = copies
            ) -> None:
                sizes.append(source.nbytes)
                copy(target, source)

            device.copy_in = counted  # type: ignore[method-assign]
            gather(model, device)
            found = generate(model, device, PROMPTS, wish)
            assert found.tokens == expected
            assert 0 < found.peak_device_bytes <= device.memory_bytes
            seen[share], copied[share] = found.resident, sum(copies)
    assert seen == {0.5: False, 0.9: False, 3.0: True}
    assert copied[0.5] > copied[0.9] > copied[3.0]
    assert copied[3.0] < 2.5 * all_bytes  # read once, and once more to stay


def test_what_is_not_on_the_device_cannot_be_used_by_accident() -> None:
    model = gpt().eval()
    assert isinstance(model, GPT)
    weight = model.blocks[3].qkv.weight
    with closing(EmulatedDevice(1 << 30, 1e12)) as device, device.computing():
        with Streamed(model, device):
            assert model.blocks[3].qkv.weight.is_meta
            with pytest.raises((RuntimeError, NotImplementedError)):
                model.blocks[3].qkv.weight.detach().sum().item()
        assert model.blocks[3].qkv.weight is weight
