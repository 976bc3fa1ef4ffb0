"""`atom init`: writes a recipe that suits this machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from atomtrain.cli.interrupts import leaving_at_once
from atomtrain.cli.parsing import parse
from atomtrain.errors import ConfigError
from atomtrain.training.options import option
from atomtrain.training.recipe_files import (
    options_with,
    read_recipe,
    ready_recipes,
    recipe_path,
)
from atomtrain.units import format_bytes

FIRST = "pretrain-small"
_GIB = 1 << 30
_EXAMPLES = """\
  atom init                                asks, then writes recipe.yaml
  atom init --yes                          takes every proposal
  atom init --from join-swarm --out swarm.yaml --yes"""
Ask = Callable[[str, str], str]


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """What a user can say to `atom init`."""

    source: str | None = option(
        None,
        "Ready recipe to start from. Default: asked for, or pretrain-small.",
        "NAME",
        flag="from",
    )
    out: Path = option(Path("recipe.yaml"), "File to write.", "FILE")
    yes: bool = option(False, "Ask nothing: take every proposal.")


class Facts(NamedTuple):
    """What decides which proposals suit a machine."""

    host_bytes: int
    gpu: str | None
    """Name of the first GPU."""
    gpu_bytes: int


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        InitOptions,
        arguments,
        prog="atom init",
        about="Ask a few questions, look at the machine, and write a recipe for 'atom train'.",
        examples=_EXAMPLES,
    )
    if options.out.exists():
        raise ConfigError(f"{options.out} is already there; choose another --out, or remove it")
    if not options.yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; give --yes to take every proposal")
    with leaving_at_once():
        facts = machine_facts()
    sys.stdout.write(f"this machine: {_said(facts)}\n")
    ask = _take if options.yes else _ask
    source = options.source or _chosen(ask)
    text = filled(recipe_path(source).read_text(encoding="utf-8"), facts, ask)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    options_with(read_recipe(options.out), {})
    sys.stdout.write(f"wrote {options.out}; start with: atom train {options.out}\n")
    return 0


def machine_facts() -> Facts:
    """Look at the machine."""
    import torch

    from atomtrain.swapping.machines import host_memory_bytes

    if not torch.cuda.is_available():
        return Facts(host_memory_bytes(), None, 0)
    card = torch.cuda.get_device_properties(0)
    return Facts(host_memory_bytes(), card.name, card.total_memory)


def filled(text: str, facts: Facts, ask: Ask) -> str:
    """Return a ready recipe with the answers and what the machine asks for in it.

    Its comments stay; a proposal is the value that stands there.
    """
    for key, question in (
        ("model", "model (a name, or the folder of a Hugging Face model)"),
        ("data", "text to train on (file, folder or pattern)"),
        ("steps", "optimizer steps"),
    ):
        line = re.search(rf"^{key}:[ ]*([^#\n]*?)[ ]*(#.*)?$", text, re.MULTILINE)
        if line is not None:
            answer = ask(question, line[1])
            text = text[: line.start(1)] + answer + text[line.end(1) :]
    address = re.search(r"^  - (RUN@\S+)", text, re.MULTILINE)
    if address is not None:
        answer = ask("address that a peer of the run printed", address[1])
        text = text[: address.start(1)] + answer + text[address.end(1) :]
    budget = ask("device memory to use", _budget(facts))
    if budget and not re.search(r"^device-memory:", text, re.MULTILINE):
        text = text.rstrip("\n") + f"\ndevice-memory: {budget}\n"
    return f"# For: {_said(facts)}\n{text}"


def _budget(facts: Facts) -> str:
    """Return a device budget: nine tenths of a GPU, or a gibibyte that is emulated."""
    return f"{max(1, 9 * facts.gpu_bytes // 10 // _GIB)}GiB" if facts.gpu else "1GiB"


def _said(facts: Facts) -> str:
    gpu = f"{facts.gpu} with {format_bytes(facts.gpu_bytes)}" if facts.gpu else "no GPU (emulated)"
    return f"{format_bytes(facts.host_bytes)} of host memory, {gpu}"


def _chosen(ask: Ask) -> str:
    names = list(ready_recipes())
    sys.stdout.write("ready recipes: " + ", ".join(names) + "\n")
    return ask("start from", FIRST)


def _take(_: str, proposal: str) -> str:
    return proposal


def _ask(question: str, proposal: str) -> str:
    try:
        return input(f"{question} [{proposal}]: ").strip() or proposal
    except EOFError as error:
        raise ConfigError("no more answers came; give --yes to take every proposal") from error
