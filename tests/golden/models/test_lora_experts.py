"""Adapters of experts: swapped is resident bit for bit, and peft computes and merges the same."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain.checkpoint import open_checkpoint
from atomtrain.cli.main import main
from atomtrain.data.sampler import Batch
from atomtrain.engine.api import swap
from atomtrain.engine.options import Options
from atomtrain.models.hugging_face import build, read_config, read_quantisation
from atomtrain.models.lora import ExpertAdapter, adapted_layers, begun_layers, merged_experts
from atomtrain.models.lora_config import LoraConfig, parse_lora
from atomtrain.models.making import parameter_count
from atomtrain.models.narrow import NarrowParameter, adapted_by, experts_of
from atomtrain.models.quantised import dequantise, quantise
from atomtrain.optimizers import AdamW
from atomtrain.training.setup.loading import Weights
from atomtrain.training.setup.objective import NextToken
from atomtrain.training.setup.state import model_of
from tests.support.adapted_models import adapted
from tests.support.hugging_face_models import (
    MIXTURES,
    saved_tensors,
    train_by_command,
    write_model,
    write_text,
)
from tests.support.quantised_folders import FORMS, write_quantised
from tests.support.reference import train as resident

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")
_IDS = torch.arange(24).view(2, 12)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def steps() -> list[list[dict[str, torch.Tensor]]]:
    ids = torch.randint(290, (3, 4, 13), generator=torch.Generator().manual_seed(2))
    batches = [Batch(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
    return [NextToken().micro_batches(batch, 2) for batch in batches]


@pytest.mark.usefixtures("assumed_times")
@pytest.mark.parametrize(
    ("kind", "targets", "memory"),
    [
        ("qwen3_moe", "q_proj+experts", "640KiB"),
        ("mixtral", "all-linear+gate_up_proj", "640KiB"),
        ("gpt_oss", "experts", "640KiB"), ("qwen3_moe", "experts,bits=8", "400KiB"),
        ("gpt_oss", "all-linear+experts,bits=4", "400KiB"),
        ("qwen3_moe", "all-linear,bits=8", "148KiB"),
        ("qwen3_moe", "q_proj+v_proj,bits=4", "144KiB"),
        ("gpt_oss", "q_proj+down_proj,bits=4", "268KiB"),
        ("mxfp4", "q_proj+down_proj,bits=4", "400KiB"),
        ("fp8 experts", "q_b_proj+down_proj,bits=8", "200KiB"),
        ("gptq", "q_proj+down_proj,bits=4", "160KiB"),
        ("gptq of 8 bits, mixed", "q_proj,bits=8", "160KiB"),
    ],
)  # fmt: skip
def test_swapped_adapters_of_experts_are_resident_ones_bit_for_bit(
    kind: str, targets: str, memory: str, tmp_path: Path
) -> None:
    config = parse_lora(f"r=4,alpha=8,targets={targets}")
    if kind in FORMS:
        write_quantised(tmp_path, kind)
        config = config.published_as(read_quantisation(tmp_path))
    else:
        write_model(tmp_path, MIXTURES[kind])
    expected, model = (adapted(tmp_path, config) for _ in range(2))
    objective = NextToken()
    begun = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = AdamW([p for p in expected.parameters() if p.requires_grad], lr=1e-2)

    def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return objective.loss(model(batch["input_ids"]), batch)

    losses = resident(expected, steps(), optimizer, loss_of)
    with swap(
        model,
        steps()[0][0],
        optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        device="emulated",
        device_memory=memory,
        loss=objective.loss,
        options=Options(micro_batches=2, optimizer_on_device=False),
    ) as engine:
        assert len(engine.plan.backward_bounds) > 3
        assert [engine.step(micro_batches) for micro_batches in steps()] == losses
        engine.synchronize()
        assert engine.last is not None
        assert engine.last.device_peak_bytes <= engine.plan.device_peak_bytes
        for name, parameter in expected.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name
            assert torch.equal(parameter, begun[name]) != parameter.requires_grad, name
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    adapts = "experts" in targets or "gate_up_proj" in targets
    assert any(".expert_lora.gate_up_proj." in name for name in trained) == adapts
    assert not any(name.endswith(".gate_up_proj") for name in trained)
    wide = [name for name in begun if name.endswith(".experts.gate_up_proj")]
    assert len(wide) == (3 if config.bits is None else 0)
    held = [m for m in model.modules() if isinstance(m, NarrowParameter)]
    mixtures = sum(name.endswith("down_proj") for name in experts_of(build(read_config(tmp_path))))
    assert len(held) == (0 if config.bits is None else 2 * mixtures)
    assert all(each.mxfp4 == (kind == "mxfp4") for each in held)
    sorts = [name for name in begun if name.endswith(".order")]
    assert len(sorts) == (7 * 3 if kind.startswith("gptq") else 0)  # all linear layers
    assert all((each.scales.dtype == torch.int32) == (kind == "fp8 experts") for each in held)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_in_few_bits_are_made_wide_where_they_run(
    kind: str, bits: int, tmp_path: Path
) -> None:
    write_model(tmp_path, MIXTURES[kind])
    sizes = read_config(tmp_path)
    plain, weights = build(sizes), Weights(tmp_path, sizes)
    weights.fill(plain)
    narrow = adapted(tmp_path, parse_lora(f"r=4,alpha=8,targets=experts,bits={bits}"))
    assert parameter_count(narrow) == parameter_count(plain) + sum(
        p.numel() for p in narrow.parameters() if p.requires_grad
    )
    wide_bytes = sum(plain.get_parameter(name).nbytes for name in experts_of(plain))
    frozen = [p for m in narrow.modules() if isinstance(m, NarrowParameter) for p in m.parameters()]
    assert 0 < sum(p.nbytes for p in frozen) < wide_bytes * (bits + 2.1) / 32
    values = dict(plain.named_parameters())
    with torch.no_grad():
        for name, layer in begun_layers(narrow).items():
            base = values[adapted_by(name) or f"{name}.weight"]
            packed = [quantise(part, bits) for part in (base if base.ndim == 3 else [base])]
            near = torch.stack([dequantise(*each, torch.float32) for each in packed])
            assert (near - base).norm() < base.norm() * (0.01 if bits == 8 else 0.1)
            adapts = isinstance(layer, ExpertAdapter)
            base.copy_(layer.current(near) if adapts else near.view(base.shape))
        assert torch.equal(narrow(_IDS).logits, plain(_IDS).logits)


@pytest.mark.parametrize("transposed", [False, True])
def test_each_expert_has_a_product_of_its_own(transposed: bool) -> None:
    experts, outputs, inputs, rank = 3, 5, 4, 2
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(experts, outputs, inputs, generator=generator)
    base = base.mT.contiguous() if transposed else base
    adapter = ExpertAdapter(base, LoraConfig(r=rank, alpha=6.0), transposed=transposed)
    a, b = adapter.lora_A.weight, adapter.lora_B.weight
    assert a.shape == (experts * rank, inputs)
    assert b.shape == (outputs, rank * experts)
    torch.nn.init.normal_(b, generator=generator)
    found = adapter.current(base)
    merged = merged_experts(base, adapter.state_dict(), adapter.scale, transposed=transposed)
    assert found.shape == base.shape
    torch.testing.assert_close(found, merged)
    for expert in range(experts):
        product = b[:, expert::experts] @ a[expert * rank : (expert + 1) * rank] * 3.0
        expected = base[expert] + (product.mT if transposed else product)
        torch.testing.assert_close(found[expert], expected)


train = partial(train_by_command, memory="4MiB", sequences=2, steps=2)


def unmerged(folder: Path, run: Path, lora: str) -> Any:
    """Return the model beside its trained adapters, by ATOM alone."""
    model, trained = adapted(folder, parse_lora(lora)), saved_tensors(run)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(trained.pop(f"{name}/parameter"))
    assert not any("lora_" in key and key.endswith("/parameter") for key in trained)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "lora", "adapted_experts"),
    [
        ("qwen3_moe", "r=4,alpha=8,targets=q_proj+experts", 6),
        ("mixtral", "r=4,alpha=8,rslora=true,targets=experts", 6),
        ("gpt_oss", "r=4,alpha=8,targets=all-linear+down_proj", 3),
        ("deepseek_v3", "r=4,alpha=8,targets=all-linear+experts", 4),
        ("glm4_moe", "r=4,alpha=8,targets=q_proj+down_proj", 2),
    ],
)
def test_the_command_trains_experts_that_peft_loads_and_merges(
    kind: str, lora: str, adapted_experts: int, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    folder, text = tmp_path / kind, write_text(tmp_path / "text.txt")
    write_model(folder, MIXTURES[kind])
    run = train(folder, text, "mine", "--lora", lora)
    assert main(["export", str(run), "adapters"]) == 0
    assert main(["export", str(run), "merged", "--merge"]) == 0
    said = json.loads(Path("adapters/adapter_config.json").read_text())
    assert "experts.down_proj" in said["target_parameters"]
    assert said["target_modules"] == [] or {"q_proj", "q_a_proj"} & set(said["target_modules"])

    theirs = peft.PeftModel.from_pretrained(load(folder), "adapters").eval()
    given = {n: p for n, p in theirs.named_parameters() if "lora_B" in n}
    assert sum(".experts." in name for name in given) == adapted_experts
    assert all(p.abs().sum() > 0 for p in given.values())
    ours = unmerged(folder, run, lora)
    with torch.no_grad():
        expected = theirs(_IDS).logits
        found = ours(_IDS).logits
        # Linear layers that peft takes as parameters are merged before they multiply.
        as_parameters = any(name.endswith(".weight") for name in said["target_parameters"])
        assert as_parameters == (kind in ("deepseek_v3", "glm4_moe"))
        assert torch.allclose(found, expected, atol=1e-6)
        assert as_parameters or torch.equal(found, expected)
        assert not torch.allclose(load(folder).eval()(_IDS).logits, expected, atol=1e-4)

        inside = theirs.merge_and_unload().state_dict()
        merged, again = load("merged").state_dict(), model_of(open_checkpoint(run))[0].state_dict()
        assert inside.keys() == merged.keys() == again.keys()
        for name, tensor in inside.items():
            assert torch.equal(tensor, merged[name]), name
            assert torch.equal(tensor, again[name]), name
        assert torch.allclose(load("merged").eval()(_IDS).logits, expected, atol=1e-5)


def test_linear_layers_that_peft_takes_for_experts_are_exported_as_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dense layers and shared experts of DeepSeek-V3 have a `gate_proj`."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    folder, text = tmp_path / "moe", write_text(tmp_path / "text.txt")
    write_model(folder, MIXTURES["deepseek_v3"])
    run = train(folder, text, "dropped", "--lora", "r=4,targets=gate_proj,dropout=0.1")
    assert main(["export", str(run), "adapters"]) == 0
    theirs = peft.PeftModel.from_pretrained(load(folder), "adapters").eval()
    assert main(["export", str(run), "merged", "--merge"]) == 0
    with torch.no_grad():
        expected = load("merged").eval()(_IDS).logits
        assert torch.allclose(theirs(_IDS).logits, expected, atol=1e-5)
        assert not torch.allclose(load(folder).eval()(_IDS).logits, expected, atol=1e-4)

    run = train(folder, text, "lengths", "--lora", "r=4,targets=gate_proj,dora=true")
    capsys.readouterr()
    assert main(["export", str(run), "lengths"]) == 2
    told = capsys.readouterr().err
    assert "export the whole model with --merge" in told
    assert told.count("\n") == 1
    assert not Path("lengths").exists()
    assert main(["export", str(run), "lengths", "--merge"]) == 0


def test_adapters_of_experts_resume_with_the_same_bits(tmp_path: Path) -> None:
    folder, text = tmp_path / "moe", write_text(tmp_path / "text.txt")
    write_model(folder, MIXTURES["qwen3_moe"])
    lora = ("--lora", "r=4,bits=4,targets=all-linear+experts", "--precision", "bf16")
    run = train(folder, text, "mine", *lora, "--checkpoint-every", "1")
    expected = saved_tensors(run)
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    train(folder, text, "mine", "--resume")
    found = saved_tensors(run)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert any(".expert_lora.down_proj.lora_B.weight/exp_avg" in key for key in expected)


def test_all_linear_adapts_no_experts(tmp_path: Path) -> None:
    write_model(tmp_path, MIXTURES["qwen3_moe"])
    model = adapted(tmp_path, LoraConfig())
    assert len(experts_of(model)) == 6
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ("targets=expert", "Did you mean 'experts'"),
        ("targets=gate_up_prjo", "Did you mean 'gate_up_proj'"),
        ("targets=experts,dora=true", "neither dora nor dropout"),
        ("targets=down_proj,dropout=0.1", "neither dora nor dropout"),
    ],
)
def test_mistakes_are_one_line(
    lora: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "moe", MIXTURES["qwen3_moe"])
    text = write_text(tmp_path / "text.txt")
    arguments = ["--model", str(tmp_path / "moe"), "--data", str(text), "--plain"]
    capsys.readouterr()
    assert main(["train", *arguments, "--lora", lora, "--device", "emulated"]) == 2
    told = capsys.readouterr().err
    assert expected in told
    assert told.count("\n") == 1
