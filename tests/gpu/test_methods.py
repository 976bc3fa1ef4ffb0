"""What people train with on a real GPU, beyond the engine: `make test-gpu`. Skipped without one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atombench.families.case import measure
from atomtrain.data.sampler import Batch
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.generation.generating import Wish, generate
from atomtrain.models import GPT, GPTConfig
from atomtrain.models.forms import to_fp8, to_nf4, to_steps
from atomtrain.models.lora_config import parse_lora
from atomtrain.models.quantised import Quantised, dequantise, quantise, to_mxfp4
from atomtrain.optimizers import AdamW, Muon
from atomtrain.training.setup.objective import NextToken, OwnLoss
from tests.support.adapted_models import adapted
from tests.support.hugging_face_models import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY, TOKENS = 512, 96
BUDGET = "256MiB"
STREAMED = "84MiB"
"""Libraries keep 72 MiB of it."""
WIDTHS: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "use_cache": False,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64,
}  # fmt: skip
TILE = (1, 32)
FORMS: dict[str, Callable[[Tensor], Quantised]] = {
    "8 bits": lambda weight: quantise(weight, 8),
    "NF4": lambda weight: quantise(weight, 4),
    "MXFP4": to_mxfp4,
    "published FP8": lambda weight: to_fp8(weight, TILE),
    "published steps": lambda weight: to_steps(weight, TILE),
    "published NF4": to_nf4,
}


def hugging_face(kind: str) -> Any:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    more = EXPERTS if kind == "Qwen3Moe" else {}
    config = getattr(hf, f"{kind}Config")(**WIDTHS, **more)
    return getattr(hf, f"{kind}ForCausalLM")(config)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(layers=6, width=256, heads=4, head_width=64, vocabulary=VOCABULARY, context=128)
    )


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (8, TOKENS + 1), generator=generator)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    return [dict(each) for each in NextToken().micro_batches(batch, 4)]


def train(
    model: nn.Module, steps: int = 3, optimizer: Any = None, **options: Any
) -> tuple[list[float], dict[str, Tensor], atomtrain.Engine]:
    """Train on the same micro-batches again and again."""
    with atomtrain.swap(
        model,
        batches()[0],
        optimizer=optimizer or (lambda parameters: AdamW(parameters, lr=1e-3)),
        device="cuda",
        device_memory=BUDGET,
        loss=NextToken().loss,
        options=atomtrain.Options(**{"micro_batches": 2, **options}),
    ) as engine:
        losses = [engine.step(batches()) for _ in range(steps)]
        engine.synchronize()
        state = {name: value.clone() for name, value in engine.state_dict().items()}
    return losses, state, engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_matrices_in_few_bits_are_the_same_numbers_as_on_the_host(
    form: str, dtype: torch.dtype
) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(3))
    codes, scales = FORMS[form](weight)
    there = dequantise(codes.cuda(), scales.cuda(), dtype)
    assert torch.equal(there.cpu(), dequantise(codes, scales, dtype))


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("llama", "r=4,alpha=8"),
        ("llama", "r=4,alpha=8,bits=8"),
        ("llama", "r=4,alpha=8,bits=4"),
        ("qwen3_moe", "r=4,alpha=8,targets=all-linear+experts,bits=4"),
    ],
)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_adapters_have_the_same_bits_in_every_partition(
    kind: str, lora: str, precision: str | None, tmp_path: Path
) -> None:
    """One segment moves nothing during a step, so it is the resident reference."""
    pytest.importorskip("transformers")
    more = EXPERTS if kind == "qwen3_moe" else {}
    write_model(tmp_path, {"model_type": kind, **WIDTHS, **more})

    def made(segments: int) -> tuple[list[float], dict[str, Tensor]]:
        losses, state, _ = train(
            adapted(tmp_path, parse_lora(lora)),
            optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
            segments=segments,
            deterministic=True,
            precision=precision,
            host_layers=0,
        )
        return losses, state

    whole, expected = made(1)
    losses, state = made(6)
    assert losses == whole
    assert losses[-1] < losses[0]
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_a_hugging_face_model_trains_as_in_an_ordinary_loop_on_the_gpu(kind: str) -> None:
    reference = hugging_face(kind).cuda().train()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        total = 0.0
        for batch in batches():
            there = {name: value.cuda() for name, value in batch.items()}
            loss = NextToken().loss(reference(input_ids=there["input_ids"]), there)
            (loss / 2).backward()
            total += float(loss.detach()) / 2
        optimizer.step()
        expected.append(total)
    losses, _, engine = train(
        hugging_face(kind),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        segments=4,
        host_layers=0,
    )
    assert losses == pytest.approx(expected, rel=2e-3)
    assert engine.last is not None
    assert engine.last.device_peak_bytes <= engine.device.memory_bytes


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gpt_oss", "qwen3_moe", "mamba2"])
def test_families_have_the_bits_of_an_ordinary_loop_on_the_gpu(family: str) -> None:
    """With dropout, masks that the model adds, experts and states; updates are the host's."""
    pytest.importorskip("transformers")
    row = measure(family, "cuda")
    assert (row["result"], row["evaluation"]) == ("equal", "equal"), row


def _matrices(model: nn.Module, large: bool) -> list[nn.Parameter]:
    return [p for p in model.parameters() if (p.ndim == 2) is large]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_updates_on_the_gpu_are_those_of_the_host_up_to_rounding(name: str) -> None:
    found = []
    for on_device in (False, True):
        model = gpt()

        def optimizer(parameters: Any, model: nn.Module = model) -> Any:
            if name == "adamw":
                return AdamW(parameters, lr=1e-3)
            groups = [
                {"params": _matrices(model, True), "algorithm": "muon"},
                {"params": _matrices(model, False), "algorithm": "adamw"},
            ]
            return Muon(groups, lr=1e-3)

        losses, _, engine = train(
            model, optimizer=optimizer, optimizer_on_device=on_device, host_layers=0,
            precision="bf16",
        )  # fmt: skip
        assert bool(engine.plan.device_blocks) is on_device
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=2e-3)
    assert found[1][-1] < found[1][0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_learn_as_float32_does(precision: str) -> None:
    expected, _, _ = train(gpt(), steps=5)
    losses, _, engine = train(gpt(), steps=5, precision=precision)
    assert losses == pytest.approx(expected, rel=0.02)
    assert engine.last is not None
    assert losses[-1] < 0.98 * losses[0]


@pytest.mark.parametrize("kind", ["gpt", "Llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_documents_do_not_see_each_other(kind: str, dtype: torch.dtype) -> None:
    model = (gpt() if kind == "gpt" else hugging_face(kind)).to("cuda", dtype).eval()
    inputs = OwnLoss().inputs if kind == "gpt" else NextToken().inputs
    generator = torch.Generator().manual_seed(5)
    lengths = (40, 41, 15)
    documents = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    other = ids.clone()
    other[:, : lengths[0]] = torch.randint(VOCABULARY, (1, lengths[0]), generator=generator)
    logits = []
    with torch.no_grad():
        for each in (ids, other):
            batch = inputs(Batch(each, each, documents=documents))
            logits.append(model(**{k: v.cuda() for k, v in batch.items()}).logits[0])
    assert not torch.equal(logits[0][: lengths[0]], logits[1][: lengths[0]])
    assert torch.equal(logits[0][lengths[0] :], logits[1][lengths[0] :])


@pytest.mark.parametrize("kind", ["gpt", "Llama", "Qwen3Moe"])
def test_a_model_that_does_not_fit_writes_what_a_resident_one_writes(kind: str) -> None:
    model = (gpt() if kind == "gpt" else hugging_face(kind)).eval()
    found = []
    for memory in ("1GiB", STREAMED):
        with closing(open_device("cuda", memory)) as device:
            found.append(generate(model, device, [[5, 7, 11], [1, 2]], Wish(12, 0.0)))
    assert [each.resident for each in found] == [True, False]
    assert found[0].tokens == found[1].tokens
    assert [len(tokens) for tokens in found[0].tokens] == [12, 12]


def test_compiled_layers_train_as_they_are() -> None:
    expected, _, _ = train(gpt(), precision="bf16", host_layers=0)
    losses, _, engine = train(gpt(), precision="bf16", host_layers=0, compile=True)
    assert engine.compiling.compiled
    assert losses == pytest.approx(expected, rel=5e-3)
