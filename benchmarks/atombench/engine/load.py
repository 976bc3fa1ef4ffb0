"""`atom bench load`: what reading a Hugging Face model's weights takes of memory and time.

A random model is written as a folder of bfloat16 files. A process of its own makes an engine of it
as `atom train --model FOLDER` does, and its peak of resident memory is compared with what the host
store holds afterwards: parameters, and masters where there are some.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.engine.apart import forget_peak, memory_bytes
from atomtrain.engine.api import swap
from atomtrain.engine.devices.host_memory import give_back
from atomtrain.engine.engine import Engine
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError
from atomtrain.models.hugging_face import (
    HuggingFaceConfig,
    build,
    read_config,
    require_transformers,
)
from atomtrain.training.config.new_recipe import make_optimizer, new_recipe
from atomtrain.training.config.optimizing import precision_of
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.setup.loading import Weights
from atomtrain.training.setup.objective import NextToken

_CHILD_S = 600.0
_SHARD = "50MB"
_BYTES = {"fp32": 4, "bf16": 6, "fp16": 6}
"""Host bytes of a parameter, by precision: itself, and its master."""


def run(options: BenchmarkOptions) -> Result:
    """Measure; see the module."""
    require_transformers("the benchmark's model")
    layers, width = (6, 256) if options.quick else (24, 1024)
    rows = []
    with tempfile.TemporaryDirectory(prefix="atom-load-") as temporary:
        folder = Path(temporary) / "model"
        progress(f"writing a random model of {layers} layers, {width} wide")
        _child("write", str(folder), str(layers), str(width))
        for precision in _BYTES:
            progress(f"loading it with precision {precision}")
            rows.append({"precision": precision, **_child("load", str(folder), precision)})
    return {
        **description(),
        "inputs": {"layers": layers, "width": width, "stored": "bfloat16", "shard": _SHARD},
        "rows": rows,
        "peak_ratio": max(row["peak_ratio"] for row in rows),
        "bit_equal": all(row["bit_equal"] for row in rows),
    }


def _child(*arguments: str) -> Any:
    command = [sys.executable, "-m", "atombench.engine.load", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S, check=False)
    if done.returncode:
        raise ConfigError(f"the benchmark's process failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _write(folder: Path, layers: int, width: int) -> Result:
    model: Any = build(
        HuggingFaceConfig(
            config={
                "model_type": "llama", "vocab_size": 16384, "hidden_size": width,
                "intermediate_size": 8 * width // 3, "num_hidden_layers": layers,
                "num_attention_heads": width // 64, "num_key_value_heads": width // 64,
                "max_position_embeddings": 512, "tie_word_embeddings": False,
            },
            vocabulary=16384, context=512, width=width,
        )
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=_SHARD)
    return {}


def _load(folder: Path, precision: str) -> Result:
    torch.set_num_threads(1)
    # Libraries and caches come first, with an engine that is thrown away.
    _engine(folder, precision, layers=1).close()
    # What it leaves behind would be used again, and so would not count.
    gc.collect()
    give_back()
    forget_peak()
    before_bytes = memory_bytes()
    started_s = time.perf_counter()
    engine = _engine(folder, precision)
    load_s = time.perf_counter() - started_s
    peak_bytes = memory_bytes("VmHWM") - before_bytes
    after_bytes = memory_bytes() - before_bytes
    size_bytes = _BYTES[precision] * engine.parameters
    stored_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {
        "parameters": engine.parameters,
        "size_bytes": size_bytes,
        "stored_bytes": stored_bytes,
        "peak_bytes": peak_bytes,
        "peak_ratio": peak_bytes / size_bytes,
        "after_ratio": after_bytes / size_bytes,
        "load_s": load_s,
        "read_bytes_per_s": stored_bytes / load_s,
        "bit_equal": _equal(engine, folder),
    }


def _engine(folder: Path, precision: str, layers: int | None = None) -> Engine:
    sizes = read_config(folder)
    if layers is not None:
        sizes.config["num_hidden_layers"] = layers
    recipe = new_recipe(TrainOptions(model=str(folder), precision=precision, context=16))
    weights = Weights(folder, sizes) if layers is None else None
    model = build(sizes)
    objective = NextToken()
    ids = torch.zeros((1, 16), dtype=torch.int64)
    engine = swap(
        model,
        {"input_ids": ids, "targets": ids, "mean_targets": torch.tensor(16.0)},
        optimizer=lambda _: make_optimizer(model, recipe),
        device="emulated",
        device_memory="256MiB",
        loss=objective.loss,
        options=Options(precision=precision_of(precision), profile=False),
    )
    if weights is not None:
        weights.load(engine)
    return engine


def _equal(engine: Engine, folder: Path) -> bool:
    """Return whether the engine holds what transformers reads."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    expected = load(folder, dtype=torch.float32).state_dict()
    state = engine.state_dict()
    return all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def main() -> None:
    """Do one part in a process of its own, as the command line says."""
    part, folder, *rest = sys.argv[1:]
    if part == "write":
        result = _write(Path(folder), int(rest[0]), int(rest[1]))
    else:
        result = _load(Path(folder), rest[0])
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
