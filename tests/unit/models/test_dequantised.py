"""Weights in few bits: their values are those of the formulas, and damage is told in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.errors import ConfigError, DataError
from atomtrain.models.confined import check_method
from atomtrain.models.dequantised.files import DequantisedFiles, open_weights
from atomtrain.models.hugging_face import read_config
from atomtrain.models.weights.files import WeightFiles
from tests.support import quantised_folders as quantised
from tests.support.quantised_folders import Tensors, change_config, change_tensors, write_quantised

pytest.importorskip("transformers")

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
BITSANDBYTES = {"quant_method": "bitsandbytes"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}


def opened(folder: Path, tensors: Tensors, settings: dict[str, Any]) -> DequantisedFiles:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors")
    check_method(settings, "config.json")
    return DequantisedFiles(WeightFiles(folder), settings)


def per_tensor(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    made, _ = quantised.fp8(name, weight)
    scale = torch.tensor(0.25)
    return {name: made[name], f"{name}_scale_inv": scale}, made[name].float() / 4


def per_row(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    made, _ = quantised.fp8(name, weight)
    scales = torch.rand(len(weight), 1).bfloat16()
    return {name: made[name], f"{name}_scale_inv": scales}, made[name].float() * scales.float()


def exponents(dtype: torch.dtype) -> Callable[[str, Tensor], tuple[Tensors, Tensor]]:
    def quantise(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        made, _ = quantised.fp8(name, weight)
        bytes_ = torch.tensor([[120, 127, 130], [110, 128, 100]], dtype=torch.uint8)
        scales = (2.0 ** (bytes_.double() - 127)).float().repeat_interleave(16, 0)
        scales = scales.repeat_interleave(16, 1)[: weight.shape[0], : weight.shape[1]]
        name_of_scales = f"{name.removesuffix('weight')}scale"
        return {name: made[name], name_of_scales: bytes_.view(dtype)}, made[name].float() * scales

    return quantise


FORMS: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "fp8": (quantised.fp8, FP8, (32, 48)),
    "fp8, smaller last blocks": (quantised.fp8, FP8, (24, 40)),
    "fp8, a scale": (per_tensor, {"quant_method": "fp8"}, (8, 6)),
    "fp8, a scale a row": (per_row, {"quant_method": "fp8"}, (8, 6)),
    "fp8, bytes": (exponents(torch.uint8), FP8, (24, 40)),
    "fp8, exponents": (exponents(torch.float8_e8m0fnu), FP8, (24, 40)),
    "mxfp4": (quantised.mxfp4, {"quant_method": "mxfp4"}, (3, 64, 20)),
    "nf4": (quantised.nf4, BITSANDBYTES, (24, 40)),
    "nf4, not nested": (lambda n, w: quantised.nf4(n, w, nested=False), BITSANDBYTES, (24, 40)),
    "nf4, odd": (lambda n, w: quantised.nf4(n, w, dtype="float32"), BITSANDBYTES, (7, 11)),
    "int8": (quantised.int8, BITSANDBYTES, (24, 40)),
    "gptq": (quantised.gptq, GPTQ, (24, 64)),
    "gptq, version 2": (
        lambda n, w: quantised.gptq(n, w, later=0), {**GPTQ, "checkpoint_format": "gptq_v2"},
        (24, 64),
    ),
    "gptq, 8 bits": (
        lambda n, w: quantised.gptq(n, w, bits=8, mixed=False), {**GPTQ, "bits": 8}, (24, 64),
    ),
    "gptq, 2 bits": (lambda n, w: quantised.gptq(n, w, bits=2), {**GPTQ, "bits": 2}, (32, 64)),
    "gptq, one group": (
        lambda n, w: quantised.gptq(n, w, group=64), {**GPTQ, "group_size": -1}, (24, 64),
    ),
    "awq": (quantised.awq, {**GPTQ, "quant_method": "awq"}, (24, 64)),
}  # fmt: skip


@pytest.mark.parametrize("in_slices", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_the_formula(
    form: str, in_slices: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    quantise, settings, shape = FORMS[form]
    stored, expected = quantise("a.b.weight", torch.randn(shape))
    files = opened(tmp_path, {**stored, "plain": torch.arange(3.0)}, settings)
    if in_slices:
        for module in ("floats", "bitsandbytes", "integers"):
            path = f"atomtrain.models.dequantised.{module}.SLICE_ELEMENTS"
            monkeypatch.setattr(path, 128)
    assert set(files) - {"a.b.weight_format"} == {"a.b.weight", "plain"}
    assert files.entries["a.b.weight"].shape == shape
    found = files.read("a.b.weight")
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert torch.equal(files.reader(torch.bfloat16)("a.b.weight"), expected.bfloat16())
    assert torch.equal(files.reader(torch.bfloat16)("plain"), torch.arange(3.0))
    with pytest.raises(DataError, match=r"config\.json and weights must be of one model"):
        files.read_into("a.b.weight", torch.empty(1))


def test_experts_of_fp8_may_lie_together(tmp_path: Path) -> None:
    each = [quantised.fp8("w", torch.randn(24, 40)) for _ in range(3)]
    stored = {
        "experts.up": torch.stack([made["w"].view(torch.uint8) for made, _ in each]).view(
            torch.float8_e4m3fn
        ),
        "experts.up_scale_inv": torch.stack([made["w_scale_inv"] for made, _ in each]),
    }
    files = opened(tmp_path, stored, FP8)
    assert torch.equal(files.read("experts.up"), torch.stack([wide for _, wide in each]))


@pytest.mark.parametrize("form", ["fp8", "nf4", "int8"])
def test_reading_needs_little_beside_what_is_read(form: str, tmp_path: Path) -> None:
    """Every storage counts; a layer is many slices."""
    quantise, settings, _ = FORMS[form]
    stored, expected = quantise("a.weight", torch.randn(2048, 2048))
    files, target = opened(tmp_path, stored, settings), torch.empty(2048, 2048)
    with StorageTracker() as tracker:
        tracker.adopt(target)
        tracker.reset_peak()
        files.read_into("a.weight", target)
    assert torch.equal(target, expected)
    assert target.nbytes < tracker.peak_bytes <= target.nbytes + (5 << 20)


def _without(part: str) -> Callable[[Path], None]:
    def change(tensors: Tensors) -> None:
        names = [name for name in tensors if name.endswith(part)]
        assert names
        tensors.pop(names[0])

    return lambda folder: change_tensors(folder, change)


def _with(part: str, made: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def change(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith(part))
        tensors[name] = made(tensors[name])

    return lambda folder: change_tensors(folder, change)


def _says(**settings: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, quantization_config=settings)


def _nonsense(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, 65)


DAMAGED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no scales": ("fp8", _without("_scale_inv"), "weight_scale_inv' is missing"),
    "no codes": ("fp8", _without("q_proj.weight"), "is not in 8-bit floating point"),
    "scales of another shape": (
        "fp8", _with("_scale_inv", lambda t: t[:, :1]), "config.json and weights must be of one",
    ),
    "scales of another type": (
        "fp8", _with("_scale_inv", lambda t: t.to(torch.int32)), "as int32; it may be float32, ",
    ),
    "scales that are no numbers": (
        "fp8", _with("_scale_inv", lambda t: t * torch.nan), "(NaN or infinite)",
    ),
    "a block that is none": (
        "fp8", _says(quant_method="fp8", weight_block_size=[128]), "two positive whole numbers",
    ),
    "no scales of experts": ("mxfp4", _without("_scales"), "_scales' is missing"),
    "no blocks of experts": ("mxfp4", _without("_blocks"), "_blocks' is missing"),
    "blocks of another shape": (
        "mxfp4", _with("_blocks", lambda t: t[..., :8]), "not [experts, outputs, blocks, 16]",
    ),
    "scales of fewer experts": ("mxfp4", _with("_scales", lambda t: t[1:]), "complete copy"),
    "no state": ("nf4", _without("bitsandbytes__nf4"), "bitsandbytes__nf4' is missing"),
    "a state that is none": (
        "nf4", _with("bitsandbytes__nf4", _nonsense), "does not say how a weight was quantised",
    ),
    "no factors": ("nf4", _without(".nested_absmax"), "nested_absmax' is missing"),
    "half of the codes": (
        "nf4", _with("q_proj.weight", lambda t: t[:-1]), "which is not half of [32, 32]",
    ),
    "no row factors": ("int8", _without("SCB"), "SCB' is missing"),
    "no zero points": ("gptq", _without("qzeros"), "qzeros' is missing"),
    "groups beyond": ("gptq", _with("g_idx", lambda t: t + 1), "with groups beyond"),
    "3 bits": ("gptq", _says(quant_method="gptq", bits=3), "says bits '3'"),
    "another version": (
        "awq", _says(quant_method="awq", bits=4, version="gemv"), "read are gemm, GEMM",
    ),
    "a group that is none": (
        "awq", _says(quant_method="awq", bits=4, group_size=0), "says group_size '0'",
    ),
    "unknown": ("fp8", _says(quant_method="fp7"), "Did you mean 'fp8'?"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_told_in_one_line(damage: str, tmp_path: Path) -> None:
    form, spoil, expected = DAMAGED[damage]
    write_quantised(tmp_path, form)
    spoil(tmp_path)
    with pytest.raises((ConfigError, DataError)) as refused:  # noqa: PT012 (whichever is first)
        read_config(tmp_path)
        files = open_weights(tmp_path)
        for name in files:
            files.read(name)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_wide_too_is_refused(tmp_path: Path) -> None:
    stored, wide = quantised.gptq("a.weight", torch.randn(24, 64))
    with pytest.raises(DataError, match=r"'a\.weight' is there wide, too"):
        opened(tmp_path, {**stored, "a.weight": wide}, GPTQ)
