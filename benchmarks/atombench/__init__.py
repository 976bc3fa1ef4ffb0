"""Benchmarks: measurements that everybody can repeat, each one function and one JSON object."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atomtrain.errors import ConfigError, nearest

if TYPE_CHECKING:
    from atombench.common import BenchmarkOptions

__all__ = ["NAMES", "REGISTRY", "Benchmark", "benchmark"]


class Benchmark(NamedTuple):
    """A benchmark by the module that holds it; nothing heavy is imported before it runs."""

    module: str
    """Full name of a module with `run(options)`."""
    help: str
    """One line for people."""
    takes: tuple[str, ...] = ()
    """Options that are not of every benchmark, but of this one."""
    shown_by: str | None = None
    """Full name of a module with `text(result)`, in place of a table of all keys, and with
    `draw(result, path)` for a picture."""

    def run(self, options: BenchmarkOptions) -> dict[str, Any]:
        """Import the module, measure, and return plain JSON values."""
        result: dict[str, Any] = importlib.import_module(self.module).run(options)
        return result

    def text(self, result: dict[str, Any]) -> str | None:
        """Return a result for people; `None`: a table of all keys will do."""
        found: str | None = self.shown_by and importlib.import_module(self.shown_by).text(result)
        return found

    def draw(self, result: dict[str, Any], path: Path) -> None:
        """Draw a result, of a benchmark that is `shown_by` a module."""
        assert self.shown_by is not None
        importlib.import_module(self.shown_by).draw(result, path)


_PANELS = "atombench.network.panels"
REGISTRY: dict[str, Benchmark] = {
    "swap": Benchmark("atombench.engine.swap", "step time of swapped against resident training"),
    "depth": Benchmark("atombench.engine.depth", "peak device memory of models of growing depth"),
    "optimizer": Benchmark(
        "atombench.engine.optimizer", "host optimizers against plain copies of as many bytes"
    ),
    "overhead": Benchmark(
        "atombench.engine.overhead", "what the launching thread spends on a block"
    ),
    "opening": Benchmark(
        "atombench.engine.opening",
        "time to open a model of 24 layers and of its first step",
        takes=("beside",),
    ),
    "generate": Benchmark(
        "atombench.engine.generate", "generated tokens a second against transformers; streamed too"
    ),
    "precision": Benchmark(
        "atombench.engine.precision", "host memory and loss of bfloat16 with exact masters"
    ),
    "disk": Benchmark(
        "atombench.engine.disk", "optimizer state and parameters on disk against in memory"
    ),
    "network": Benchmark(
        "atombench.network.network",
        "ATOM against a pipeline on links from fast to slow",
        takes=("peers", "links", "link"),
        shown_by=_PANELS,
    ),
    "time-to-loss": Benchmark(
        "atombench.network.time_to_loss",
        "loss against time on slow links, ATOM and baselines",
        takes=("peers",),
        shown_by=_PANELS,
    ),
    "simulation": Benchmark(
        "atombench.simulation", "ATOM and the best pipeline on many links, simulated"
    ),
    "offloaders": Benchmark(
        "atombench.offloaders.offloaders",
        "ATOM against DeepSpeed ZeRO-3 and FSDP2 with CPU offload",
        takes=("device", "device_memory"),
    ),
    "context": Benchmark(
        "atombench.engine.context", "a step of 131,072 tokens on a device of 2 GiB"
    ),
    "large": Benchmark(
        "atombench.engine.large",
        "a 7B model on one GPU under a cap of its memory",
        takes=("device_memory", "model", "optimizer", "micro_batches", "steps"),
    ),
    "plan": Benchmark(
        "atombench.engine.plan",
        "predicted against measured step time and memory peaks",
        takes=("case",),
    ),
    "load": Benchmark(
        "atombench.engine.load", "memory and time of reading a Hugging Face model's weights"
    ),
    "finetune": Benchmark(
        "atombench.engine.finetune", "SmolLM2-135M fine-tuned on a device of 256 MiB, exported"
    ),
    "curve": Benchmark(
        "atombench.engine.curve",
        "SmolLM2-135M's loss in each step against transformers.Trainer and peft",
    ),
    "gguf": Benchmark(
        "atombench.engine.gguf", "SmolLM2-135M as GGUF: llama.cpp against transformers"
    ),
    "families": Benchmark(
        "atombench.families.families",
        "every family of transformers: bits of swapped training against an ordinary loop",
        takes=("model", "device"),
    ),
    "swarm": Benchmark(
        "atombench.swarm.swarm", "training slowed down by averaging in the background"
    ),
    "codecs": Benchmark(
        "atombench.swarm.codecs", "wire formats on one core, compiled and with PyTorch"
    ),
    "liars": Benchmark(
        "atombench.liars.liars",
        "what liars do to a swarm's loss, and what the defences cost",
        takes=("costs",),
    ),
    "means": Benchmark("atombench.liars.means", "ways to average, against liars' contributions"),
    "outer": Benchmark(
        "atombench.swarm.outer", "loss of averaged and of poisoned peers at equal tokens"
    ),
    "averaging": Benchmark(
        "atombench.averaging.averaging", "a round of averaging against hivemind and the link"
    ),
    "mistakes": Benchmark("atombench.mistakes", "how quickly and plainly mistakes are answered"),
    "install": Benchmark("atombench.install", "packages and bytes that installing brings along"),
    "dashboard": Benchmark(
        "atombench.dashboard.dashboard", "the dashboard in a browser, with long runs and many peers"
    ),
    "join": Benchmark(
        "atombench.swarm.join", "a newcomer's download over a link, and what others notice"
    ),
    "relay": Benchmark(
        "atombench.swarm.relay", "state through a relay against straight from its donor"
    ),
    "churn": Benchmark(
        "atombench.churn.churn",
        "training while peers are killed and new ones join",
        takes=("peers", "kills", "at_once"),
    ),
}


NAMES = (*REGISTRY, "report")
"""What may follow `atom bench`; `report` makes a page of results of the others."""


def benchmark(name: str) -> Benchmark:
    """Return a benchmark by name.

    Raises:
        ConfigError: there is no such benchmark; offers the nearest name.
    """
    try:
        return REGISTRY[name]
    except KeyError:
        raise ConfigError(
            f"there is no benchmark {name!r}.{nearest(name, NAMES)} Benchmarks: {', '.join(NAMES)}"
        ) from None
