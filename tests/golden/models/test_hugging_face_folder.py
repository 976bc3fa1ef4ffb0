"""A Hugging Face folder trained by the real command: what a plain loop gives, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from atomtrain.checkpoint import open_checkpoint
from atomtrain.cli.main import main
from atomtrain.data.corpus import read_corpus
from atomtrain.data.sampler import Sampler, SamplerConfig
from atomtrain.data.tokens import prepare
from atomtrain.files import default_cache
from atomtrain.training.config.new_recipe import make_optimizer
from atomtrain.training.setup.state import recipe_of
from tests.support.hugging_face_models import LLAMA, saved_tensors, write_model, write_text

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")
STEPS, SEQUENCES, CONTEXT = 3, 4, 16


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(folder: Path, text: Path, run: str, *more: str) -> Path:
    arguments = [
        "train", "--model", str(folder), "--data", str(text), "--run", run, "--host", "127.0.0.1",
        "--device", "emulated:4GiB/s", "--device-memory", "2MiB", "--context", str(CONTEXT),
        "--sequences", str(SEQUENCES), "--steps", str(STEPS), "--plain",
        "--no-profile", "--threads", "1", "--evaluate-every", "100", "--checkpoint-every", "100",
    ]  # fmt: skip
    assert main([*arguments, *more]) == 0
    return Path("runs") / run / "peer-0"


def resident(model: Any, micro_batch: int, text: Path, run: Path) -> dict[str, torch.Tensor]:
    """Train the model that transformers loaded, in an ordinary loop on the same batches."""
    recipe, tokenizer = recipe_of(open_checkpoint(run))
    tokens = prepare(read_corpus(str(text)), default_cache(), tokenizer=tokenizer).tokens
    config = SamplerConfig(context_tokens=CONTEXT, sequences=SEQUENCES, seed=recipe.seed)
    sampler = Sampler(tokens.train, config, "peer-0")
    model.train()
    optimizer = make_optimizer(model, recipe)
    for step in range(STEPS):
        batch = sampler.batch(step)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.zero_grad(set_to_none=True)
        for row in range(0, SEQUENCES, micro_batch):
            rows = slice(row, row + micro_batch)
            logits = model(batch.inputs[rows], use_cache=False).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, batch.labels[rows].flatten())
            (loss / (SEQUENCES // micro_batch)).backward()
        clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
    return dict(model.named_parameters())


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "tie_word_embeddings": False},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 3, "n_head": 4,
        "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
    },
    # Its code asks for the device; the command traces it on the meta device first.
    "gpt_oss": {
        **LLAMA, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 8, "tie_word_embeddings": False,
        "pad_token_id": 0, "eos_token_id": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "micro_batch"), [("llama", 2), ("gpt2", 4), ("gpt_oss", 2)])
def test_trained_exported_and_loaded_again_is_the_ordinary_loop(
    kind: str, micro_batch: int, tmp_path: Path
) -> None:
    # With tied weights and several micro-batches gradients add up in another order.
    folder, text = tmp_path / kind, write_text(tmp_path / "text.txt")
    write_model(folder, CONFIGS[kind], shard="20KB")
    run = train(folder, text, "mine", "--micro-batch", str(micro_batch))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load: Any = AutoModelForCausalLM.from_pretrained
    expected = resident(load(folder, dtype=torch.float32), micro_batch, text, run)

    assert main(["export", str(run), "out", "--shard-size", "30KB"]) == 0
    assert len(list(Path("out").glob("*.safetensors"))) > 1
    again, info = load("out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    trained = dict(again.named_parameters())
    assert trained.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(trained[name], parameter), name
    assert json.loads(Path("out/config.json").read_text())["dtype"] == "float32"
    words = AutoTokenizer.from_pretrained("out")("the cat", return_tensors="pt")
    written = again.generate(words["input_ids"], max_new_tokens=4, do_sample=False)
    assert written.shape[1] == words["input_ids"].shape[1] + 4


def test_bfloat16_exports_the_masters_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    model = write_model(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    run = train(folder, text, "mine", "--precision", "bf16", "--checkpoint-every", "1")
    expected = saved_tensors(run)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    train(folder, text, "mine", "--resume", "--model", str(folder))
    found = saved_tensors(run)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert main(["export", str(run), "out"]) == 0
    assert main(["export", str(run), "narrow", "--dtype", "bfloat16"]) == 0
    from safetensors.torch import load_file

    wide, narrow = load_file("out/model.safetensors"), load_file("narrow/model.safetensors")
    for name, tensor in wide.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.to(torch.bfloat16), narrow[name])
