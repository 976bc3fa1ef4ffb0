"""Tokens a second of generated text: resident, by `transformers`' own loop, and streamed.

The model is a random Llama of the shape of SmolLM2-135M. `transformers_tokens_per_s` is
`model.generate` with the same threads, prompts and numbers of tokens; both take the likeliest ones
and take turns, and of each the fastest turn counts. Streamed, the emulated device has little more
than embedding, head and two blocks take, so nearly all blocks pass its link for every token.
`bit_equal` says whether the first logits are the same bits in all three, and the tokens too.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atombench.common import BenchmarkOptions, Result, description, progress, require_positive
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.generation.generating import Wish, generate
from atomtrain.engine.generation.predicting import Predictor
from atomtrain.engine.generation.streaming import Streamed, gather
from atomtrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GenerateSetup:
    """Inputs of the benchmark; the shape is that of SmolLM2-135M."""

    layers: int = 30
    width: int = 576
    inner: int = 1536
    heads: int = 9
    key_heads: int = 3
    vocabulary: int = 49152
    prompts: int = 2
    prompt_tokens: int = 32
    tokens: int = 48
    """New ones of each prompt."""
    turns: int = 3
    budget_share: float = 1.2
    """Of the device, over what embedding, head and two blocks take."""
    device: str = "emulated:4GiB/s"
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)


QUICK = GenerateSetup(layers=6, tokens=12, turns=1)


def run(options: BenchmarkOptions, setup: GenerateSetup | None = None) -> Result:
    """Measure; return the keys of the benchmarks' contract and the inputs.

    Raises:
        ConfigError: transformers, which has the Llama, is missing.
    """
    setup = setup or (QUICK if options.quick else GenerateSetup())
    model, ids = _llama(setup), _prompts(setup)
    wish = Wish(max_new_tokens=setup.tokens, temperature=0.0)
    ours_per_s = theirs_per_s = 0.0
    with closing(open_device("cpu")) as host:
        for _ in range(setup.turns):
            found = generate(model, host, ids.tolist(), wish)
            ours_per_s = max(ours_per_s, found.tokens_per_s)
            theirs, per_s = _theirs(model, ids, setup.tokens)
            theirs_per_s = max(theirs_per_s, per_s)
            progress(f"{found.tokens_per_s:.1f} tokens/s, transformers {per_s:.1f}")
        logits = _first_logits(model, host, ids)
    same = found.tokens == theirs and torch.equal(logits, _their_logits(model, ids))
    with closing(open_device(setup.device)) as device:
        least_bytes = Streamed(model, device).least_bytes
    with closing(open_device(setup.device, int(setup.budget_share * least_bytes))) as device:
        gather(model, device)
        streamed = generate(model, device, ids.tolist(), wish)
        same = same and streamed.tokens == found.tokens
        same = same and torch.equal(logits, _first_logits(model, device, ids))
        budget_bytes = device.memory_bytes
    return {
        "generate_tokens_per_s": ours_per_s,
        "transformers_tokens_per_s": theirs_per_s,
        "ratio": ours_per_s / theirs_per_s,
        "streamed_tokens_per_s": streamed.tokens_per_s,
        "streamed_whole": streamed.resident,
        "model_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "budget_bytes": budget_bytes,
        "peak_device_bytes": streamed.peak_device_bytes,
        "bit_equal": same,
        "threads": torch.get_num_threads(),
        "inputs": asdict(setup),
        **description(),
    }


def _llama(setup: GenerateSetup) -> Any:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        raise ConfigError("the Llama is of transformers: pip install 'atomtrain[hf]'") from error
    config = LlamaConfig(
        num_hidden_layers=setup.layers,
        hidden_size=setup.width,
        intermediate_size=setup.inner,
        num_attention_heads=setup.heads,
        num_key_value_heads=setup.key_heads,
        vocab_size=setup.vocabulary,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,  # all turns write as many tokens
    )
    torch.manual_seed(setup.seed)
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def _prompts(setup: GenerateSetup) -> Tensor:
    generator = torch.Generator().manual_seed(setup.seed)
    shape = (setup.prompts, setup.prompt_tokens)
    return torch.randint(setup.vocabulary, shape, generator=generator)


def _theirs(model: Any, ids: Tensor, tokens: int) -> tuple[list[list[int]], float]:
    started_s = time.perf_counter()
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    taken_s = time.perf_counter() - started_s
    new = whole[:, ids.shape[1] :]
    return new.tolist(), new.numel() / taken_s


def _their_logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        last: Tensor = model(input_ids=ids, logits_to_keep=1).logits[:, -1]
    return last


def _first_logits(model: nn.Module, device: Device, ids: Tensor) -> Tensor:
    predict = Predictor(model, None, device.torch_device)
    if device.one_memory:
        return predict(ids)
    streamed = Streamed(model, device)
    with device.computing(), streamed:
        return predict(ids).clone()
