"""A GGUF file of the real command, read by gguf and transformers: it is the ordinary export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from atomtrain.cli.main import main
from tests.support.hugging_face_models import (
    LLAMA,
    tokenizer,
    train_by_command,
    write_model,
    write_text,
    write_tokenizer,
)
from tests.support.sentencepiece import SETTINGS, converted

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")

SIZES = {**LLAMA, "intermediate_size": 64, "num_hidden_layers": 2, "rope_theta": 5000.0}
UNTIED = {**SIZES, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": {**UNTIED, "model_type": "mistral", "head_dim": 16, "sliding_window": 96},
    "qwen2": {**UNTIED, "model_type": "qwen2"},
    # Its reader in transformers knows no other width of a head.
    "qwen3": {**SIZES, "model_type": "qwen3", "head_dim": 128},
}
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(kind: str, *more: str) -> Path:
    """Return the folder of a peer that trained a model of this family for a step."""
    folder = Path(kind).absolute()
    write_model(folder, FAMILIES[kind])
    write_tokenizer(folder, chat_template=TEMPLATE)
    text = write_text(Path("text.txt"))
    return train_by_command(folder, text, "mine", *more, memory="4MiB", sequences=2, steps=1)


def published(name: str) -> str:
    """Return what transformers calls a tensor of the file."""
    *block, kind, part = name.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{NAMES[kind]}.{part}"


def neighbours(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Put each row of a head's second half behind its partner in the first half."""
    width = len(tensor) // heads
    rows = [
        head * width + half * width // 2 + row
        for head in range(heads)
        for row in range(width // 2)
        for half in range(2)
    ]
    return tensor[rows]


def expected(name: str, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    tensor = weights[published(name)]
    if config["model_type"] in ("llama", "mistral"):
        if ".attn_q." in name:
            return neighbours(tensor, config["num_attention_heads"])
        if ".attn_k." in name:
            return neighbours(tensor, config["num_key_value_heads"])
    return tensor


def field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def check_tensors(file: str, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    """Compare a file with a folder's float32 tensors; return its reader."""
    reader, kind = gguf.GGUFReader(file), Path(file).stem
    assert {published(tensor.name) for tensor in reader.tensors} == weights.keys()
    for tensor in reader.tensors:
        wide = expected(tensor.name, weights, config)
        found = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert tensor.tensor_type.name == ("F32" if wide.ndim == 1 else kind.upper())
        if wide.ndim > 1 and kind == "q8_0":
            assert found.shape == wide.shape
            scales = wide.reshape(-1, 32).abs().amax(1, keepdim=True) / 127
            error = (found - wide).reshape(-1, 32).abs()
            # Numbers are rounded to steps, and the step to float16, whose least one is 2^-24.
            rounded = 127 * (scales / 2**11).clamp(min=2**-25)
            assert (error <= scales * 0.5001 + rounded).all(), tensor.name
        else:
            narrow = wide if wide.ndim == 1 else wide.to(DTYPES[kind]).float()
            assert torch.equal(found, narrow), tensor.name
    return reader


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_file_has_the_folders_tensors_and_numbers_and_transformers_reads_its_logits(
    kind: str,
) -> None:
    from transformers import AutoModelForCausalLM

    run, config = trained(kind), FAMILIES[kind]
    assert main(["export", str(run), "out"]) == 0
    weights = load_file("out/model.safetensors")
    for written in ("bf16", "q8_0", "f16") if kind == "llama" else ("f16",):
        assert main(["export", str(run), f"{written}.gguf", "--gguf", written]) == 0
        reader = check_tensors(f"{written}.gguf", weights, config)

    made = tokenizer()
    numbers = {
        "general.architecture": kind, f"{kind}.block_count": 2, f"{kind}.context_length": 128,
        f"{kind}.embedding_length": 32, f"{kind}.feed_forward_length": 64,
        f"{kind}.attention.head_count": 4, f"{kind}.attention.head_count_kv": 2,
        f"{kind}.attention.key_length": config.get("head_dim", 8),
        f"{kind}.rope.dimension_count": config.get("head_dim", 8),
        f"{kind}.rope.freq_base": 5000.0, f"{kind}.vocab_size": config["vocab_size"],
        "general.file_type": 1, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": made.separator, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    assert {key: field(reader, key) for key in numbers} == numbers
    assert field(reader, f"{kind}.attention.layer_norm_rms_epsilon") == np.float32(1e-6)
    stored = json.loads(made.to_json())["model"]
    tokens = field(reader, "tokenizer.ggml.tokens")
    assert {text: tokens.index(text) for text in stored["vocab"]} == stored["vocab"]
    assert len(tokens) == config["vocab_size"]
    assert field(reader, "tokenizer.ggml.merges") == [" ".join(pair) for pair in stored["merges"]]

    load: Any = AutoModelForCausalLM.from_pretrained
    ordinary = load("out", dtype=torch.float32)
    for parameter in ordinary.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.half().float()
    read = load(".", gguf_file="f16.gguf", dtype=torch.float32)
    words = torch.tensor([made.encode("the cat sat on the mat")])
    assert torch.equal(read(words).logits, ordinary(words).logits)


def test_adapters_are_merged_and_the_context_is_that_of_the_sliding_window() -> None:
    run = trained("mistral", "--lora", "r=4,alpha=8")
    assert main(["export", str(run), "out", "--merge"]) == 0
    assert main(["export", str(run), "bf16.gguf", "--gguf", "bf16"]) == 0
    weights = load_file("out/model.safetensors")
    reader = check_tensors("bf16.gguf", weights, FAMILIES["mistral"])
    assert field(reader, "general.architecture") == "llama"
    assert field(reader, "llama.context_length") == 96


def test_a_tokenizer_of_sentencepiece_is_read_with_its_tokens() -> None:
    from transformers import AutoTokenizer

    folder, text = Path("llama").absolute(), write_text(Path("text.txt"))
    write_model(folder, {**SIZES, "vocab_size": 500})
    stored = converted(["the cat sat on the mat and the dog lay by the door"])
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    run = train_by_command(folder, text, "mine", memory="4MiB", sequences=2, steps=1)
    assert main(["export", str(run), "out"]) == 0
    assert main(["export", str(run), "f16.gguf", "--gguf", "f16"]) == 0
    reader = gguf.GGUFReader("f16.gguf")
    assert field(reader, "tokenizer.ggml.model") == "llama"
    assert field(reader, "tokenizer.ggml.add_space_prefix") is True
    assert len(field(reader, "tokenizer.ggml.scores")) == 500
    load: Any = AutoTokenizer.from_pretrained
    read, expected = load(".", gguf_file="f16.gguf"), load("out")
    # transformers' own reader puts no space before a text that begins with one.
    for words in ("the cat", "on  the roof", "Zo\u00eb\n\u6f22\U0001f600 mat", ""):
        assert read(words).input_ids == expected(words).input_ids, words
        assert expected(words).input_ids[0] == 1
