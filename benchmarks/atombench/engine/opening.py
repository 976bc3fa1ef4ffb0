"""`atom bench opening`: how long a model takes to open, and its first step.

A small random Llama of many layers opens and makes one step in a process of its own. The first one
is not counted: it measures the machine, which later ones read from a file. Medians are of the
others. With `--beside` another version is measured as well; the two take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import atomtrain
from atombench.common import BenchmarkOptions, Result, description, progress, require_positive
from atomtrain.errors import ConfigError

_TURN_S = 600
_CODE = """\
import json, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import atomtrain

setup = json.loads(sys.argv[1])
torch.manual_seed(setup["seed"])
model = LlamaForCausalLM(LlamaConfig(
    num_hidden_layers=setup["layers"], hidden_size=setup["width"],
    intermediate_size=setup["inner"], num_attention_heads=setup["heads"],
    num_key_value_heads=setup["key_heads"], vocab_size=setup["vocabulary"], use_cache=False,
)).train()
ids = torch.randint(setup["vocabulary"], (1, setup["tokens"]))
example = {"input_ids": ids, "labels": ids}
begun = time.perf_counter()
engine = atomtrain.swap(
    model, example, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    device=setup["device"], device_memory=setup["device_memory"],
    options=atomtrain.Options(micro_batches=2),
)
opened = time.perf_counter()
loss = engine.step([example, example])
stepped = time.perf_counter()
engine.close()
print(json.dumps({"open_s": opened - begun, "first_step_s": stepped - opened, "loss": loss}))
"""


@dataclass(frozen=True, kw_only=True)
class OpeningSetup:
    """Inputs of the benchmark."""

    layers: int = 24
    width: int = 256
    inner: int = 688
    heads: int = 8
    key_heads: int = 4
    vocabulary: int = 2048
    tokens: int = 128
    device: str = "emulated:4GiB/s"
    device_memory: str = "64MiB"
    turns: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)


QUICK = OpeningSetup(layers=4, turns=1)


def run(options: BenchmarkOptions, setup: OpeningSetup | None = None) -> Result:
    """Measure; see the module.

    Raises:
        ConfigError: there is no other version where `beside` says, or one cannot open the model.
    """
    setup = setup or (QUICK if options.quick else OpeningSetup())
    sources = {"this": Path(atomtrain.__file__).resolve().parents[1]}
    if options.beside is not None:
        sources["beside"] = _source_in(options.beside)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for turn in range(setup.turns + 1):
        for name, source in sources.items():
            found = _turn(source, setup)
            progress(f"{name}: opened in {found['open_s']:.1f} s")
            if turn:
                turns[name].append(found)
    medians = {name: _median(found) for name, found in turns.items()}
    result: Result = {**description(), "inputs": asdict(setup), **medians["this"]}
    if "beside" in medians:
        ours, theirs = (each["open_s"] + each["first_step_s"] for each in medians.values())
        result |= {"beside": medians["beside"], "ratio": ours / theirs}
    return result


def _source_in(folder: Path) -> Path:
    source = folder.resolve() / "src"
    if not (source / "atomtrain" / "__init__.py").is_file():
        raise ConfigError(
            f"--beside {folder} has no src/atomtrain; give another checkout of ATOM, such as one "
            "that `git worktree add ../before COMMIT` makes"
        )
    return source


def _turn(source: Path, setup: OpeningSetup) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _CODE, json.dumps(asdict(setup))],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True, text=True, timeout=_TURN_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ConfigError(f"{source} cannot open the model: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _median(turns: list[dict[str, float]]) -> dict[str, Any]:
    return {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
