"""Small folders as they are published in few bits, and what their weights are by the formulas.

What is expected is computed whole and plainly, from the formulas that the formats' authors give.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.hugging_face_models import MIXTURES, UNTIED, write_model

Tensors = dict[str, Tensor]
QWEN3: dict[str, Any] = {**UNTIED, "model_type": "qwen3", "head_dim": 8}
GPT_OSS: dict[str, Any] = {
    **MIXTURES["gpt_oss"], "hidden_size": 32, "intermediate_size": 32,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {**MIXTURES["deepseek_v3"], "qk_rope_head_dim": 16}
_LINEAR = re.compile(r"layers\.\d+\..*_proj(_with_mqa)?\.weight$")
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip


def fp8(name: str, weight: Tensor, block: tuple[int, int] = (16, 16)) -> tuple[Tensors, Tensor]:
    """Return a matrix in e4m3 with a scale a block, and what it is."""
    rows, columns = weight.shape
    stored, wide = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = (
                slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]),
            )  # fmt: skip
            scales[i, j] = weight[where].abs().max() / 448
            stored[where] = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn)
            wide[where] = stored[where].float() * scales[i, j]
    return {name: stored, f"{name}_scale_inv": scales}, wide


def mxfp4(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """Return experts `[E, I, O]` in MXFP4, and what they are; codes are drawn, not fitted."""
    experts, inputs, outputs = weight.shape
    codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), dtype=torch.uint8)
    scales = torch.randint(118, 124, codes.shape[:3], dtype=torch.uint8)
    wide = torch.tensor(_E2M1)[codes.long()] * 2.0 ** (scales.double() - 127)[..., None]
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    made = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return made, wide.flatten(2).transpose(1, 2).float()


def nf4(
    name: str, weight: Tensor, *, nested: bool = True, dtype: str = "bfloat16"
) -> tuple[Tensors, Tensor]:
    """Return a matrix as bitsandbytes stores it in 4 bits, and what it is."""
    block, flat = 64, weight.flatten()
    count = -(-flat.numel() // block)
    codes = torch.randint(0, 16, (count * block,))
    codes[::block] = 15 * torch.randint(0, 2, (count,))  # what the largest number always has
    codes[flat.numel() :] = 0
    state: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": block, "dtype": dtype, "shape": list(weight.shape),
    }  # fmt: skip
    made: Tensors = {f"{name}.quant_map": torch.tensor(_NF4)}
    factors = torch.rand(count) / 10 + 0.01
    if nested:
        inner = 4
        levels, outer = torch.linspace(-1, 1, 256), torch.rand(-(-count // inner)) / 40
        bytes_ = torch.randint(0, 256, (count,), dtype=torch.uint8)
        factors = levels[bytes_.long()] * outer[torch.arange(count) // inner] + 0.03
        made |= {
            f"{name}.absmax": bytes_, f"{name}.nested_absmax": outer,
            f"{name}.nested_quant_map": levels,
        }  # fmt: skip
        state |= {"nested_blocksize": inner, "nested_dtype": "float32", "nested_offset": 0.03}
    else:
        made[f"{name}.absmax"] = factors
    text = json.dumps(state).encode()
    made[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    pairs = codes[: flat.numel() + flat.numel() % 2].to(torch.uint8)
    made[name] = (pairs[0::2] * 16 + pairs[1::2])[:, None]
    wide = torch.tensor(_NF4)[codes] * factors.repeat_interleave(block)
    return made, wide[: flat.numel()].view(weight.shape).to(getattr(torch, dtype)).float()


def int8(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """Return a matrix as bitsandbytes stores it in 8 bits, and what it is."""
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    stem = name.removesuffix("weight")
    made = {
        name: codes, f"{stem}SCB": largest,
        f"{stem}weight_format": torch.zeros((), dtype=torch.uint8),
    }  # fmt: skip
    return made, codes * largest[:, None] * 7.874015748031496e-3


def gptq(
    name: str, weight: Tensor, *, bits: int = 4, group: int = 16, later: int = 1, mixed: bool = True
) -> tuple[Tensors, Tensor]:
    """Return a matrix as GPTQ stores it, and what it is; `mixed` has inputs in any group."""
    outputs, inputs = weight.shape
    groups = inputs // group
    codes = torch.randint(0, 1 << bits, (inputs, outputs))
    zeros = torch.randint(later, 1 << bits, (groups, outputs))
    scales = (torch.rand(groups, outputs) / 50).half()
    of = torch.arange(inputs) // group
    of = of[torch.randperm(inputs)] if mixed else of
    stem = name.removesuffix("weight")
    made = {
        f"{stem}qweight": _packed(codes.T, bits).T, f"{stem}qzeros": _packed(zeros - later, bits),
        f"{stem}scales": scales, f"{stem}g_idx": of.int(),
    }  # fmt: skip
    return made, ((codes - zeros[of]) * scales[of].float()).T


def awq(name: str, weight: Tensor, *, group: int = 16) -> tuple[Tensors, Tensor]:
    """Return a matrix as AWQ stores it, and what it is."""
    outputs, inputs = weight.shape
    codes = torch.randint(0, 16, (inputs, outputs))
    zeros = torch.randint(0, 16, (inputs // group, outputs))
    scales = (torch.rand(inputs // group, outputs) / 50).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def ordered(values: Tensor) -> Tensor:
        return values.unflatten(1, (-1, 8))[..., order].flatten(1)

    stem = name.removesuffix("weight")
    made = {
        f"{stem}qweight": _packed(ordered(codes), 4), f"{stem}qzeros": _packed(ordered(zeros), 4),
        f"{stem}scales": scales,
    }  # fmt: skip
    of = torch.arange(inputs) // group
    return made, ((codes - zeros[of]) * scales[of].float()).T


def _packed(values: Tensor, bits: int) -> Tensor:
    """Return rows of codes as int32, the earlier ones in the lower bits."""
    words = values.long().unflatten(1, (-1, 32 // bits))
    whole = sum(words[..., place] << (bits * place) for place in range(words.shape[-1]))
    assert isinstance(whole, Tensor)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


Quantise = Callable[[str, Tensor], tuple[Tensors, Tensor]]
FORMS: dict[str, tuple[dict[str, Any], Quantise, dict[str, Any]]] = {
    "fp8": (QWEN3, fp8, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "fp8 experts": (
        DEEPSEEK, fp8, {"quant_method": "fp8", "weight_block_size": [16, 16]},
    ),
    "mxfp4": (GPT_OSS, mxfp4, {"quant_method": "mxfp4"}),
    "nf4": (QWEN3, nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "int8": (QWEN3, int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "gptq": (
        QWEN3, gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
    ),
    "gptq of 8 bits": (
        QWEN3, partial(gptq, mixed=False, bits=8),
        {"quant_method": "gptq", "bits": 8, "group_size": 16},
    ),
    "gptq of 8 bits, mixed": (
        QWEN3, partial(gptq, bits=8),
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "desc_act": True},
    ),
    "gptq in order": (
        QWEN3, partial(gptq, mixed=False), {"quant_method": "gptq", "bits": 4, "group_size": 16},
    ),
    "awq": (QWEN3, awq, {"quant_method": "awq", "bits": 4, "group_size": 16}),
}  # fmt: skip
"""By a name: the model, what quantises one weight, and what `config.json` says."""


def write_quantised(
    folder: Path,
    form: str,
    wide_folder: Path | None = None,
    config: dict[str, Any] | None = None,
) -> None:
    """Write a model whose linear layers (or experts) are in few bits.

    Args:
        folder: To make.
        form: One of `FORMS`.
        wide_folder: If given, the same model is written there with wide weights.
        config: Another than the form's own.
    """
    usual, quantise, settings = FORMS[form]
    config = config or usual
    write_model(folder, config)
    tensors = load_file(folder / "model.safetensors")
    stored: Tensors = {}
    wide = dict(tensors)
    for name, tensor in tensors.items():
        experts = form == "mxfp4" and name.endswith(("gate_up_proj", "down_proj"))
        if experts or (form != "mxfp4" and _LINEAR.search(name) and tensor.dim() == 2):
            made, wide[name] = quantise(name, tensor)
            stored |= made
        else:
            stored[name] = tensor
    if wide_folder is not None:
        write_model(wide_folder, config)
        _save(wide, wide_folder)
    _save(stored, folder)
    change_config(folder, quantization_config=settings)


def _save(tensors: Tensors, folder: Path) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    """Change values of a folder's `config.json`."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the tensors of a folder's only file."""
    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    _save(tensors, folder)
