"""`atom bench finetune`: a real pretrained model, wholly fine-tuned within a small device budget.

SmolLM2-135M (`atombench.engine.smollm`) learns the demonstration corpus by the real command,
is exported, loaded by transformers, and compared with the checkpoint bit for bit. With `--quick` a
tiny random model takes its place, which shows that all of it works and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.engine.smollm import smollm_folder
from atomtrain.checkpoint import open_checkpoint
from atomtrain.data import default_cache, prepare, read_corpus
from atomtrain.errors import ConfigError
from atomtrain.events import read_events
from atomtrain.models.hugging_face import HuggingFaceConfig, build, require_transformers
from atomtrain.training.setup.state import PARAMETER, SWARM_SHARD
from atomtrain.units import parse_bytes
from atomtrain.views.runs.files import EVENTS_FILE

_COMMAND_S = 3600.0
_PROMPT, _TOKENS = "In the beginning", 8


class _Case(NamedTuple):
    """What is trained, and how."""

    device_memory: str
    context: int
    sequences: int
    steps: int
    learning_rate: float


_FULL = _Case("256MiB", context=256, sequences=2, steps=30, learning_rate=2e-4)
_QUICK = _Case("6MiB", context=32, sequences=4, steps=12, learning_rate=2e-3)


def run(options: BenchmarkOptions) -> Result:
    """Measure; see the module."""
    require_transformers("the benchmark's model")
    case = _QUICK if options.quick else _FULL
    with tempfile.TemporaryDirectory(prefix="atom-finetune-") as temporary:
        base = Path(temporary)
        folder = _tiny(base / "tiny") if options.quick else smollm_folder()
        progress(f"fine-tuning {folder.name} for {case.steps} steps")
        started_s = time.perf_counter()
        _atom(
            "train", "--model", str(folder), "--directory", str(base), "--run", "finetune",
            "--host", "127.0.0.1", "--device", "emulated:2GiB/s", "--no-profile", "--plain",
            "--device-memory", case.device_memory, "--context", str(case.context),
            "--sequences", str(case.sequences), "--steps", str(case.steps),
            "--learning-rate", str(case.learning_rate), "--evaluate-every", str(case.steps),
            "--precision", "bf16",
            "--checkpoint-every", str(case.steps),
        )  # fmt: skip
        train_s = time.perf_counter() - started_s
        peer = base / "finetune" / "peer-0"
        progress("exporting it")
        started_s = time.perf_counter()
        _atom("export", str(peer), str(base / "exported"), "--shard-size", "100MB")
        export_s = time.perf_counter() - started_s
        return {
            **description(),
            "inputs": {"model": folder.name, **case._asdict()},
            **_course(peer / EVENTS_FILE),
            "device_budget_bytes": parse_bytes(case.device_memory),
            "train_s": train_s,
            "export_s": export_s,
            **_loaded(base / "exported", peer),
        }


def _atom(*arguments: str) -> None:
    command = [sys.executable, "-m", "atomtrain.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode:
        raise ConfigError(f"atom {arguments[0]} failed: {done.stderr.strip()[-500:]}")


def _course(events: Path) -> Result:
    """Return what the run's events say."""
    found = list(read_events(events))
    steps = [event for event in found if event["event"] == "step"]
    losses = [event["loss"] for event in found if event["event"] == "evaluation"]
    started = next(event for event in found if event["event"] == "run_started")
    step_s = sorted(step["step_s"] for step in steps)
    return {
        "parameters": started["parameters"],
        "state_bytes": started["state_bytes"],
        "held_out_loss_before": losses[0],
        "held_out_loss_after": losses[-1],
        "held_out_fall_share": 1 - losses[-1] / losses[0],
        "device_peak_bytes": max(step["device_peak_bytes"] for step in steps),
        "tokens_per_step": steps[0]["tokens"],
        "step_s": step_s[len(step_s) // 2],
    }


def _loaded(exported: Path, peer: Path) -> Result:
    """Load the export with transformers, compare it with the checkpoint, and let it generate."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(exported)
    parameters = dict(model.named_parameters())
    compared = 0
    equal = True
    for shard, tensors in open_checkpoint(peer).shards():
        for key, tensor in tensors.items() if shard != SWARM_SHARD else ():
            name, _, kind = key.rpartition("/")
            if kind == PARAMETER and name in parameters:
                compared += 1
                equal = equal and torch.equal(parameters[name], tensor)
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer(_PROMPT, return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=_TOKENS, do_sample=False)
    return {
        "export_bit_equal": equal and compared == len(parameters),
        "export_files": len(list(exported.glob("*.safetensors"))),
        "generated": tokenizer.decode(written[0]),
    }


def _tiny(folder: Path) -> Path:
    """Write a tiny random model with a tokenizer of the demonstration corpus."""
    tokenizer = prepare(read_corpus(None), default_cache(), vocabulary=512).tokenizer
    sizes = HuggingFaceConfig(
        config={
            "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 128, "tie_word_embeddings": True,
            "eos_token_id": tokenizer.separator, "bos_token_id": tokenizer.separator,
        },
        vocabulary=512, context=128, width=64,
    )  # fmt: skip
    model: Any = build(sizes)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.separator_text
    }  # fmt: skip
    text = json.dumps(settings)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder
