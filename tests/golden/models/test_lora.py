"""Adapters beside frozen layers: swapped is resident bit for bit, and peft computes the same."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.checkpoint import open_checkpoint
from atomtrain.cli.main import main
from atomtrain.data.sampler import Batch
from atomtrain.engine.api import swap
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError
from atomtrain.models import quantised
from atomtrain.models.hugging_face import build, read_config
from atomtrain.models.lora import adapted_layers, add_adapters, begun_layers, merged
from atomtrain.models.lora_config import LoraConfig
from atomtrain.models.lora_embedding import LoraEmbedding
from atomtrain.models.quantised import (
    _NF4,
    E2M1,
    _levels_on,
    dequantise,
    dequantise_in_torch,
    quantise,
    quantised_linear,
    to_mxfp4,
)
from atomtrain.native import library
from atomtrain.optimizers import AdamW
from atomtrain.optimizers.compiled import same_bits
from atomtrain.planning.plan.layout import Layout
from atomtrain.training.setup.objective import NextToken
from atomtrain.training.setup.state import open_trained
from tests.support.hugging_face_models import (
    LLAMA,
    UNTIED,
    saved_tensors,
    train_by_command,
    write_model,
    write_text,
)
from tests.support.reference import train as resident

pytest.importorskip("transformers")
_IDS = torch.arange(24).view(2, 12)
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def adapted(folder: Path, config: LoraConfig) -> Any:
    """Return a model with adapters that are not zero any more."""
    from safetensors.torch import load_file

    sizes = read_config(folder)
    stored = load_file(folder / "model.safetensors")
    model = build(sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name])
    add_adapters(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, layer in begun_layers(model).items():
            for part, values in layer.beginning(partial(stored.get, f"{name}.weight"), name):
                layer.get_parameter(part).copy_(values)
        for layer in adapted_layers(model).values():
            zero = (
                layer.lora_embedding_A if isinstance(layer, LoraEmbedding) else layer.lora_B.weight
            )
            zero.copy_(0.02 * torch.randn(zero.shape, generator=generator))
    return model


def steps(model: Any) -> list[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(290, (3, 4, 13), generator=generator)
    batches = [Batch(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
    return [NextToken().micro_batches(batch, 2) for batch in batches]


GEMMA = {**UNTIED, "model_type": "gemma", "head_dim": 8, "pad_token_id": 0}
"""Multiplies what its embedding looks up."""
KINDS = {
    "lora": LoraConfig(r=4, alpha=8.0),
    "dora": LoraConfig(r=4, alpha=8.0, targets=("q_proj", "down_proj"), dora=True),
    "dropout": LoraConfig(r=4, alpha=8.0, dropout=0.3, rslora=True),
    "8 bits": LoraConfig(r=4, alpha=8.0, bits=8),
    "4 bits, dora": LoraConfig(r=4, alpha=8.0, bits=4, dora=True),
    "4 bits, two adapted": LoraConfig(r=4, alpha=8.0, bits=4, targets=("q_proj", "v_proj")),
    "embedding": LoraConfig(r=4, alpha=8.0, targets=("embed_tokens", "q_proj"), bits=4),
    "scaled embedding": LoraConfig(r=4, alpha=8.0, targets=("embed_tokens", "q_proj")),
    "modules to save": LoraConfig(r=4, alpha=8.0, modules_to_save=("down_proj", "norm")),
}


@pytest.mark.usefixtures("assumed_times")
@pytest.mark.parametrize(("kind", "tight"), [*((kind, True) for kind in KINDS), ("lora", False)])
def test_swapped_adapters_are_resident_ones_bit_for_bit(
    kind: str, tight: bool, tmp_path: Path
) -> None:
    write_model(tmp_path, GEMMA if kind.startswith("scaled") else UNTIED)
    expected, model = (adapted(tmp_path, KINDS[kind]) for _ in range(2))
    objective = NextToken()
    optimizer = AdamW([p for p in expected.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(4)

    def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return objective.loss(model(batch["input_ids"]), batch)

    losses = resident(expected, steps(expected), optimizer, loss_of)
    torch.manual_seed(4)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    with swap(
        model,
        steps(model)[0][0],
        optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        device="emulated",
        device_memory="160KiB" if tight else "1MiB",
        loss=objective.loss,
        options=Options(micro_batches=2, optimizer_on_device=False if tight else None),
    ) as engine:
        assert [engine.step(micro_batches) for micro_batches in steps(model)] == losses
        engine.synchronize()
        store = engine._core.store
        trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        layout = store.layout
        assert trained_bytes <= layout.gradients.total_bytes == store.gradients.numel()
        assert layout.gradients.total_bytes < layout.total_bytes
        assert engine.plan.gradient_bytes < engine.plan.slot_bytes or not tight
        assert engine.last is not None
        assert engine.last.device_peak_bytes <= engine.plan.device_peak_bytes
        elements = 0
        for start, stop in engine.fragment_ranges():
            with engine.fragment(start, stop) as values:
                elements += values.numel()
        assert 4 * elements == layout.gradients.total_bytes
        for name, parameter in expected.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name
        for name, before in frozen.items():
            assert torch.equal(model.get_parameter(name), before), name


def test_a_layout_of_gradients_has_no_room_for_what_is_frozen() -> None:
    from atomtrain.analysis.layers.chain import Chain, Layer

    linear = torch.nn.Linear(8, 8)
    linear.weight.requires_grad_(False)
    chain = Chain((Layer("only", linear, ("x",), ("loss",)),), ("x",), "loss", {})
    layout = Layout(chain)
    assert layout.total_bytes == 512
    assert layout.gradients.total_bytes == 256
    assert layout.gradients.offsets == {id(linear.bias): 0}
    linear.weight.requires_grad_(True)
    assert (whole := Layout(chain)).gradients is whole


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_weights_are_near_and_their_product_exact(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 96, generator=generator)
    weight[0, :48] = 0.0
    packed = quantise(weight, bits)
    wide = dequantise(*packed, torch.float32)
    share = (wide - weight).norm() / weight.norm()
    assert share < (0.01 if bits == 8 else 0.1)
    assert torch.equal(wide[0, :48], weight[0, :48])
    inputs = torch.randn(5, 96, generator=generator, requires_grad=True)
    out = quantised_linear(inputs, *packed)
    seeds = torch.randn(5, 6, generator=generator)
    out.backward(seeds)
    assert torch.equal(out, inputs @ wide.T)
    assert torch.equal(inputs.grad, seeds @ wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_and_pytorch_make_the_same_wide_weights(
    monkeypatch: pytest.MonkeyPatch, bits: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(library, "threads", lambda: 3)
    monkeypatch.setattr(library, "LEAST_ELEMENTS", 1)
    core, generator = library.core(), torch.Generator().manual_seed(bits)
    assert core is not None
    for rows, inputs in ((1, 2), (3, 64), (5, 128), (7, 62), (33, 100)):
        weight = torch.randn(rows, inputs, generator=generator)
        weight *= 10.0 ** torch.linspace(-44, 38, rows)[:, None]
        codes, scales = quantise(weight, bits)
        assert same_bits(
            dequantise(codes, scales, dtype), dequantise_in_torch(codes, scales, dtype)
        )
        # What quantising does not make, a file may hold.
        codes = torch.randint(-128, 128, codes.shape, generator=generator).to(codes.dtype)
        scales[0, 0], scales[-1, -1] = math.inf, math.nan
        wide = dequantise(codes, scales, dtype)
        assert same_bits(wide, dequantise_in_torch(codes, scales, dtype))
    monkeypatch.setattr(library, "core", lambda: None)
    assert same_bits(dequantise(codes, scales, dtype), wide)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_core_takes_scales_as_each_precision_keeps_them(
    monkeypatch: pytest.MonkeyPatch, bits: int, kept: torch.dtype
) -> None:
    codes, scales = quantise(torch.randn(5, 128), bits)
    scales = scales.to(kept)
    expected = dequantise_in_torch(codes, scales, torch.bfloat16)
    monkeypatch.delattr(quantised, "dequantise_in_torch")
    assert same_bits(dequantise(codes, scales, torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp4_is_kept_without_loss_and_made_wide_by_core_and_pytorch_alike(
    dtype: torch.dtype,
) -> None:
    """All codes under all exponents that files may hold; blocks of small and of no numbers, too."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(255)
    codes = torch.randint(0, 16, (255, 4, 32), generator=generator)
    for block, most in enumerate((1, 2, 4)):  # levels up to 0, 0.5 and 1.5, of either sign
        codes[:, block] = codes[:, block] % most + 8 * (codes[:, block] // 8)
    values = torch.tensor(E2M1)[codes] * 2.0 ** (exponents.double() - 127)[:, None, None]
    values = values.float().flatten(1)
    values = values[values.isfinite().all(1)]
    packed = to_mxfp4(values)
    assert packed.codes.shape == (len(values), 64)
    assert packed.scales.dtype == torch.uint8
    assert same_bits(dequantise(*packed, torch.float32), values)
    assert same_bits(dequantise_in_torch(*packed, torch.float32), values)
    assert same_bits(dequantise(*packed, dtype), dequantise_in_torch(*packed, dtype))
    # Others are rounded to the nearest number that there is, those above it to the largest.
    drawn = torch.randn(7, 64, generator=generator)
    near = dequantise(*to_mxfp4(drawn), torch.float32)
    largest = drawn.unflatten(1, (-1, 32)).abs().amax(-1)
    assert ((near - drawn).unflatten(1, (-1, 32)).abs() <= 0.26 * largest[..., None]).all()
    assert (near - drawn).norm() < 0.13 * drawn.norm()


def test_each_byte_of_4_bits_is_two_levels() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1)
    levels = torch.tensor(_NF4)
    expected = torch.stack((levels.repeat(16), levels.repeat_interleave(16)), -1).view(1, -1)
    wide = dequantise(codes, torch.full((1, 8), 3.0), torch.float32)
    assert torch.equal(wide, expected * 3.0)
    with FakeTensorMode() as mode:
        fake = dequantise(mode.from_tensor(codes), torch.empty(1, 8), torch.float32)
    assert fake.shape == wide.shape


def test_levels_on_a_device_are_the_same_memory_whatever_counts_or_infers() -> None:
    _levels_on.cache_clear()
    tracker = StorageTracker()
    with tracker, torch.inference_mode():
        first = _levels_on(torch.device("cpu"), _NF4)
    assert tracker.live_bytes == 0
    assert not first.is_inference()
    assert _levels_on(torch.device("cpu"), _NF4) is first


train = partial(train_by_command, memory="2MiB", sequences=4, steps=3)


def test_dropout_and_scale_are_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    write_model(tmp_path, UNTIED)
    ours = adapted(tmp_path, KINDS["dropout"])
    asked = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.3, use_rslora=True,
        target_modules=sorted({name.rpartition(".")[2] for name in adapted_layers(ours)}),
    )  # fmt: skip
    plain = build(read_config(tmp_path))
    values = ours.state_dict()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(values[name])
    theirs = peft.get_peft_model(plain, asked)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                known = name.removeprefix("base_model.model.").replace(".default", "")
                parameter.copy_(values[known])
    ids = torch.arange(24).view(2, 12)
    found = []
    for model in (ours.train(), theirs.train()):
        torch.manual_seed(5)
        found.append(model(ids).logits)
    assert torch.equal(*found)
    assert not torch.allclose(ours.eval()(ids).logits, found[0], atol=1e-4)


@pytest.mark.parametrize(
    "kind",
    [
        "r=4,alpha=8", "r=4,alpha=8,dora=true,targets=q_proj+up_proj",
        "r=4,alpha=8,rslora=true,dropout=0.1",
        "r=4,alpha=8,targets=q_proj,modules_to_save=embed_tokens+norm",
    ],
)  # fmt: skip
@pytest.mark.parametrize("config", [UNTIED, LLAMA], ids=["untied", "tied"])
def test_the_command_trains_what_peft_loads(
    kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    before = write_model(folder, config).state_dict()
    run = train(folder, text, "adapted", "--lora", kind)
    checkpoint = open_checkpoint(run)
    stored = sum(file.stat().st_size for file in checkpoint.path.glob("shard-*"))
    assert stored < (folder / "model.safetensors").stat().st_size * 2
    assert main(["export", str(run), "adapters"]) == 0
    assert main(["export", str(run), "merged", "--merge"]) == 0
    load: Any = AutoModelForCausalLM.from_pretrained
    ids = torch.arange(12)[None]
    with torch.no_grad():
        with_adapters = peft.PeftModel.from_pretrained(load(folder), "adapters").eval()
        given = {n: p for n, p in with_adapters.named_parameters() if "lora_B" in n}
        assert given
        assert all(p.abs().sum() > 0 for p in given.values())
        expected = with_adapters(ids).logits
        assert not torch.allclose(load(folder).eval()(ids).logits, expected, atol=1e-4)
        assert torch.allclose(load("merged").eval()(ids).logits, expected, atol=1e-5)
        trained = with_adapters.merge_and_unload().state_dict()
        read = open_trained(Path("adapters")).model.state_dict()
    for name, tensor in open_trained(run).model.state_dict().items():
        assert torch.equal(read[name], tensor), name
        assert torch.equal(trained[name], tensor), name
        if "save" in kind:
            saved = name in ("model.embed_tokens.weight", "model.norm.weight")
            saved |= name == "lm_head.weight" and config is LLAMA
            assert torch.equal(tensor, before[name]) != (saved or "q_proj" in name), name
    assert main(["generate", str(run), "--tokens", "2"]) == 0


def test_an_adapted_embedding_is_what_peft_loads_merges_and_writes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    before = write_model(folder, UNTIED).state_dict()
    lora = ("--lora", "r=4,alpha=8,targets=embed_tokens+q_proj,dropout=0.1,rslora=true")
    run = train(folder, text, "adapted", *lora, "--checkpoint-every", "1")
    expected = saved_tensors(run)
    assert main(["export", str(run), "adapters"]) == 0
    assert main(["export", str(run), "merged", "--merge"]) == 0
    load: Any = AutoModelForCausalLM.from_pretrained
    theirs = peft.PeftModel.from_pretrained(load(folder), "adapters").eval()
    for part in ("A", "B"):
        name = f"base_model.model.model.embed_tokens.lora_embedding_{part}.default"
        own = expected[f"model.embed_tokens.lora_embedding_{part}/parameter"]
        assert torch.equal(theirs.get_parameter(name), own), name
        assert own.any()
    theirs.save_pretrained("written")  # with the frozen embedding beside it
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = theirs(ids).logits
        assert torch.allclose(load("merged").eval()(ids).logits, logits, atol=1e-5)
        merged_by_peft = theirs.merge_and_unload().state_dict()
    for path in (run, Path("adapters"), Path("written"), Path("merged")):
        for name, tensor in open_trained(path).model.state_dict().items():
            assert torch.equal(tensor, merged_by_peft[name]), (path, name)
            changed = "q_proj" in name or "embed_tokens" in name
            assert torch.equal(tensor, before[name]) != changed, name
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    train(folder, text, "adapted", "--resume")
    found = saved_tensors(run)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    write_model(folder, UNTIED, seed=1)
    with pytest.raises(ConfigError, match=r"holds another model\.embed_tokens\.weight"):
        open_trained(Path("written"))


def test_a_scaled_embedding_is_adapted_as_by_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    write_model(tmp_path, GEMMA)
    ours = adapted(tmp_path, LoraConfig(r=4, alpha=8.0, targets=("embed_tokens",))).eval()
    values, plain = ours.state_dict(), build(read_config(tmp_path)).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(values[name])
        before = plain(_IDS).logits
        asked = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["embed_tokens"])
        theirs = peft.get_peft_model(plain, asked).eval()
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                known = name.removeprefix("base_model.model.").replace(".default", "")
                parameter.copy_(values[known])
        found = ours(_IDS).logits
        assert torch.equal(found, theirs(_IDS).logits)
        assert not torch.allclose(found, before, atol=1e-3)
        layer = ours.model.embed_tokens
        parts = {name: p for name, p in layer.named_parameters() if "lora_" in name}
        inside = theirs.merge_and_unload()
        assert torch.equal(
            merged(layer.weight, parts, layer.scale), inside.model.embed_tokens.weight
        )
        torch.testing.assert_close(inside(_IDS).logits, found)


def test_an_embedding_that_is_the_head_too_is_not_adapted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    model = write_model(folder, LLAMA)
    lora = ["--lora", "targets=embed_tokens"]
    capsys.readouterr()
    assert main(["train", "--model", str(folder), "--data", str(text), "--plain", *lora]) == 2
    told = capsys.readouterr().err
    assert "'lm_head.weight' too" in told
    assert "modules_to_save=embed_tokens in its place" in told
    assert told.count("\n") == 1
    asked = peft.LoraConfig(target_modules=["embed_tokens"])
    model.name_or_path = str(folder)
    wrapped = peft.get_peft_model(model, asked)
    wrapped.peft_config["default"].base_model_name_or_path = str(folder)
    wrapped.save_pretrained("adapters")
    with pytest.raises(ConfigError, match=r"'lm_head\.weight' too"):
        open_trained(Path("adapters"))


def test_adapters_resume_with_the_same_bits_beside_a_base_of_4_bits(tmp_path: Path) -> None:
    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    write_model(folder, UNTIED)
    lora = ("--lora", "r=4,bits=4", "--precision", "bf16", "--checkpoint-every", "1")
    run = train(folder, text, "mine", *lora)
    expected = saved_tensors(run)
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    train(folder, text, "mine", "--resume")
    found = saved_tensors(run)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert any("lora_" in key for key in expected)


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ("r=0", "at least 1"), ("rank=4", "has no part 'rank'"), ("r=four", "r=four cannot be"),
        ("dropout=1", "below 1"), ("dora=true,dropout=0.1", "leave one of them out"),
        ("modules_to_save=embed_tokns", "Did you mean 'embed_tokens'"),
        ("modules_to_save=norm++lm_head", "has an empty name"),
        ("targets=q_proj,modules_to_save=self_attn", "so there is no adapter"),
        ("targets=q_proy", "Did you mean 'q_proj'"), ("targets=embed_token", "'embed_tokens'"),
        ("targets=embed_tokens,dora=true", "has no dora"),
        ("targets=embed_tokens,init=pissa", "begins at nothing"),
        ("bits=3", "must be 8 or 4"), ("r", "lacks"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    lora: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "llama", UNTIED)
    text = write_text(tmp_path / "text.txt")
    arguments = ["--model", str(tmp_path / "llama"), "--data", str(text), "--plain"]
    capsys.readouterr()
    assert main(["train", *arguments, "--lora", lora, "--device", "emulated"]) == 2
    told = capsys.readouterr().err
    assert expected in told
    assert told.count("\n") == 1


def test_merging_is_the_adapted_matrix() -> None:
    weight, a, b = torch.randn(4, 6), torch.randn(2, 6), torch.randn(4, 2)
    parts = {"lora_A.weight": a, "lora_B.weight": b}
    assert torch.equal(merged(weight, parts, 2.0), weight + b @ a * 2.0)
    longer = merged(weight, {**parts, "lora_magnitude_vector": torch.full((4,), 3.0)}, 2.0)
    assert torch.allclose(longer.norm(dim=1), torch.full((4,), 3.0))


def test_shapes_that_do_not_fit_are_refused_before_compiled_code_sees_them() -> None:
    """The core trusts its arguments; blocks beyond 64 elements would pass its buffer."""
    codes = torch.zeros(2, 256, dtype=torch.int8)
    for scales in (torch.ones(2, 3), torch.ones(3, 4)):
        with pytest.raises(RuntimeError):
            dequantise(codes, scales, torch.float32)
    wide = dequantise(codes + 127, torch.full((2, 2), 3.0), torch.float32)  # blocks of 128
    assert torch.equal(wide, torch.full((2, 256), 3.0))
