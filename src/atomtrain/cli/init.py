"""`atom init`: writes a recipe that suits this machine."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from atomtrain.cli.parsing import complain, leaving_at_once, parse
from atomtrain.data.named import is_named
from atomtrain.data.weighted import check_sources
from atomtrain.errors import AtomError, ConfigError, DataError
from atomtrain.settings import option
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.preflight import check_early
from atomtrain.training.config.recipe_files import (
    options_with,
    read_recipe,
    ready_recipes,
    recipe_path,
)
from atomtrain.units import format_bytes, parse_bytes

FIRST = "pretrain-small"
PLACEHOLDER = "RUN@"
"""How the address begins that a ready recipe has in place of one."""
_GIB = 1 << 30
_LEAST_BUDGET_BYTES = 1 << 20
_EXAMPLES = """\
  atom init                                asks, then writes recipe.yaml
  atom init --yes                          takes every proposal
  atom init --from join-swarm --out swarm.yaml --yes"""
Check = Callable[[str], str]
"""Returns what an answer means; raises `AtomError` if it means nothing."""
Ask = Callable[[str, str, Check], str]
"""Returns the checked answer to a question, given with a proposal."""


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    source: str | None = option(
        None,
        "Recipe to start from: the name of a ready one, or a file. Default: asked for, or "
        "pretrain-small.",
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
    options = parse(
        InitOptions,
        arguments,
        prog="atom init",
        about="Ask a few questions, look at the machine, and write a recipe for 'atom train'.",
        examples=_EXAMPLES,
    )
    if options.out.exists():
        raise ConfigError(f"{options.out} is already there; choose another --out, or remove it")
    if options.source is not None:
        read_recipe(recipe_path(options.source))
    if not options.yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; give --yes to take every proposal")
    with leaving_at_once():
        facts = machine_facts()
    sys.stdout.write(f"this machine: {_said(facts)}\n")
    ask = _take if options.yes else _ask
    source = options.source or _chosen(ask)
    text = filled(recipe_path(source).read_text(encoding="utf-8"), facts, ask)
    _write(options.out, text)
    for note in notes(read_recipe(options.out).values):
        sys.stdout.write(f"note: {note}\n")
    sys.stdout.write(
        f"wrote {options.out}; start with: atom train {shlex.quote(str(options.out))}\n"
    )
    return 0


def machine_facts() -> Facts:
    from atomtrain.engine.calibration.machines import host_memory_bytes
    from atomtrain.engine.devices.gpus import vendor_here

    vendor = vendor_here()
    if vendor is None:
        return Facts(host_memory_bytes(), None, 0)
    card = vendor.card(0)
    return Facts(host_memory_bytes(), card.name, card.total_bytes)


def filled(text: str, facts: Facts, ask: Ask) -> str:
    """Return a recipe with the answers and what the machine asks for in it.

    Its comments stay; a proposal is the value that stands there. A recipe made for another machine
    gets this machine's budget, if this one has a GPU.
    """
    for key, question, check in (
        ("model", "model (a name, or the folder of a Hugging Face model)", _model),
        ("data", "text to train on (file, folder or pattern)", _data),
        ("steps", "optimizer steps", _steps),
        ("join", "address that a peer of the run printed", _address),
    ):
        node = _node(text, key)
        if node is not None:
            text = _replaced(text, node, ask(question, node.value, check))
    node = _node(text, "device-memory")
    budget = node.value if node is not None and not facts.gpu else _budget(facts)
    answer = ask("device memory to use", budget, _device_memory)
    if node is not None:
        text = _replaced(text, node, answer)
    else:
        text = text.rstrip("\n") + f"\ndevice-memory: {_scalar(answer)}\n"
    return f"# For: {_said(facts)}\n{text}"


def notes(values: dict[str, Any]) -> list[str]:
    """Return what is still missing before a run with these options can start."""
    missing = []
    model, data = values.get("model"), values.get("data", ())
    if model is not None and "/" in model and not os.path.exists(os.path.expanduser(model)):
        missing.append(f"there is no folder {model} here; it is taken for an id of Hugging Face")
    try:
        check_sources(data, values.get("validation"))
    except DataError as error:
        missing.append(str(error))
    if any(address.startswith(PLACEHOLDER) for address in values.get("join", ())):
        missing.append("join has no address yet; put in the one that a peer of the run prints")
    return missing


def _write(path: Path, text: str) -> None:
    """Write a recipe that can be used, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); choose another --out"
        ) from error
    try:
        options_with(read_recipe(path), {})
    except AtomError:
        path.unlink()
        raise


def _node(text: str, key: str) -> Any:
    """Return the YAML node of a key's value (of a list, the first one), or `None`."""
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for name, node in root.value if root is not None else ():
        if name.value.replace("_", "-") == key:
            return node.value[0] if node.id == "sequence" and node.value else node
    return None


def _replaced(text: str, node: Any, answer: str) -> str:
    """Return the text with an answer in the place of a node's value."""
    if answer == node.value:
        return text
    start, end = node.start_mark.index, node.end_mark.index
    space = " " if start == end else ""  # of an empty value
    return f"{text[:start]}{space}{_scalar(answer)}{text[end:]}"


def _scalar(answer: str) -> str:
    """Return an answer as YAML reads it, in quotes if it must."""
    import yaml

    try:
        root: Any = yaml.compose(f"key: {answer} # comment", Loader=yaml.SafeLoader)
        node = root.value[0][1]
        plain = node.value == answer and not node.tag.endswith(":null")
    except (yaml.YAMLError, AttributeError):
        plain = False
    quoted = answer.replace("'", "''")
    return answer if plain else f"'{quoted}'"


def _model(answer: str) -> str:
    check_early(TrainOptions(model=answer))
    return answer


def _data(answer: str) -> str:
    if is_named(answer):
        check_early(TrainOptions(data=(answer,)))
    return answer  # files may come later: `notes` looks for them


def _steps(answer: str) -> str:
    if not re.fullmatch("[0-9]{1,12}", answer) or int(answer) < 1:
        raise ConfigError(f"steps must be a whole number of at least 1, not {answer!r}")
    return answer


def _address(answer: str) -> str:
    answer = answer.rpartition("--join ")[2].strip()  # the whole line may be pasted
    check_early(TrainOptions(join=(answer,)))
    return answer


def _device_memory(answer: str) -> str:
    if parse_bytes(answer, "device memory") < _LEAST_BUDGET_BYTES:
        raise ConfigError(
            f"device memory of {answer} is too little; write at least 1MiB, such as 8GiB"
        )
    return answer


def _recipe(answer: str) -> str:
    read_recipe(recipe_path(answer))
    return answer


def _budget(facts: Facts) -> str:
    """Return a device budget: nine tenths of a GPU, or a gibibyte that is emulated."""
    return f"{max(1, 9 * facts.gpu_bytes // 10 // _GIB)}GiB" if facts.gpu else "1GiB"


def _said(facts: Facts) -> str:
    gpu = f"{facts.gpu} with {format_bytes(facts.gpu_bytes)}" if facts.gpu else "no GPU (emulated)"
    return f"{format_bytes(facts.host_bytes)} of host memory, {gpu}"


def _chosen(ask: Ask) -> str:
    ready = ready_recipes()
    width = max(map(len, ready))
    sys.stdout.write("ready recipes:\n")
    for name, path in ready.items():
        about = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        sys.stdout.write(f"  {name:{width}}  {about}\n")
    return ask("start from", FIRST, _recipe)


def _take(_: str, proposal: str, __: Check) -> str:
    return proposal


def _ask(question: str, proposal: str, check: Check) -> str:
    """Ask until the answer means something."""
    while True:
        try:
            answer = input(f"{question} [{proposal}]: ").strip() or proposal
        except EOFError as error:
            sys.stdout.write("\n")
            raise ConfigError("no more answers came; give --yes to take every proposal") from error
        try:
            return check(answer)
        except AtomError as error:
            complain(str(error))
