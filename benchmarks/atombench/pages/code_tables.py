"""What pages say of code: the catalogue of hardware, and every command with its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

from atombench.pages import table
from atomtrain.cli.completion import all_parsers, options_of
from atomtrain.planning import catalogue
from atomtrain.planning.catalogue import DISKS, GPUS, HOSTS, Source, pcie_bytes_per_s

_TYPES = ("fp32", "tf32", "fp16", "bf16")
_COMMANDS = """# Commands

Every command and option, written by `python -m atombench.pages commands` from the code.
`atom COMMAND --help` says the same. Mistakes are told in one line, with exit code 2; Ctrl-C ends
with 130. `eval "$(atom completion bash)"` (or `zsh`, `fish`) completes commands and options.
"""


def gpus() -> str:
    """Return the GPUs of the catalogue, and notes on some."""
    numbers = _numbers()
    rows = [
        (
            f"`{card.name}`",
            card.memory_bytes >> 30,
            f"{card.memory_bytes_per_s / 1e9:g}",
            *(
                f"{card.flops_per_s[dtype] / 1e12:g}" if dtype in card.flops_per_s else "-"
                for dtype in _TYPES
            ),
            f"{card.pcie_generation} x{card.pcie_lanes}",
            card.host,
            ", ".join(str(numbers[source.url]) for source in card.sources),
        )
        for card in GPUS.values()
    ]
    head = ("`--gpu`", "memory, GiB", "memory, GB/s", *_TYPES, "PCIe", "host", "sources")
    notes = [f"- `{card.name}`: {card.note}.\n" for card in GPUS.values() if card.note]
    return table(head, rows) + "\n" + "".join(notes)


def links() -> str:
    """Return what PCIe carries."""
    return table(
        ("PCIe", "x16, GB/s", "x8, GB/s", "x4, GB/s"),
        (
            (n, *(f"{pcie_bytes_per_s(n, lanes) / 1e9:.1f}" for lanes in (16, 8, 4)))
            for n in (3, 4, 5)
        ),
    )


def hosts() -> str:
    """Return the hosts of the catalogue."""
    share = catalogue.HOST_MEMORY_SHARE / catalogue.UPDATE_BYTES_PER_PARAMETER
    return table(
        ("name", "GB/s of all channels", "holds up to, GiB", "AdamW, parameters/s", "source"),
        (
            (
                f"`{host.name}`",
                f"{host.memory_bytes_per_s / 1e9:.1f}",
                host.most_memory_bytes >> 30,
                f"{share * host.memory_bytes_per_s / 1e9:.2f}e9",
                _numbers()[host.source.url],
            )
            for host in HOSTS.values()
        ),
    )


def disks() -> str:
    """Return the disks of the catalogue."""
    return table(
        ("`--disk`", "reads, GB/s", "writes, GB/s", "each while it does both", "as", "source"),
        (
            (
                f"`{disk.name}`",
                f"{disk.read_bytes_per_s / 1e9:g}",
                f"{disk.write_bytes_per_s / 1e9:g}",
                f"{100 * disk.both_ways_share:.0f}%",
                disk.title,
                _numbers()[disk.source.url],
            )
            for disk in DISKS.values()
        ),
    )


def shares() -> str:
    """Return what plans take off data sheets."""
    return table(
        ("constant of `planning/catalogue.py`", "value"),
        (
            (f"`{name}`", _pairs(value) if isinstance(value, dict) else value)
            for name, value in vars(catalogue).items()
            if name.endswith("_SHARE") or name == "UPDATE_BYTES_PER_PARAMETER"
        ),
    )


def sources() -> str:
    """Return the sources of the catalogue, by number."""
    return "".join(
        f"{number}. [{source.title}]({source.url}), {source.year}\n"
        for number, source in enumerate(_all_sources().values(), start=1)
    )


def _numbers() -> dict[str, int]:
    """Return the number of each source on the page, by its address."""
    return {url: number for number, url in enumerate(_all_sources(), start=1)}


def _all_sources() -> dict[str, Source]:
    """Return the sources by address, in the order in which the page names them."""
    found = [source for card in GPUS.values() for source in card.sources]
    found += [host.source for host in HOSTS.values()]
    found += [disk.source for disk in DISKS.values()]
    return {source.url: source for source in found}


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def commands() -> str:
    """Return the page of commands."""
    sections = ("\n".join(_section(*each)) for each in all_parsers().items())
    return "\n".join([_COMMANDS, *sections])


def _section(words: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    about, _, more = (parser.description or "").partition("\n")
    yield from (f"## atom {words}", "", about, "")
    if more.strip():
        yield f"```text\n{more.strip(chr(10))}\n```\n"
    yield table(
        ("option", "what it does"),
        (
            (_name(action), _cell(action.help))
            for action in options_of(parser)
            if "--help" not in action.option_strings
        ),
    )
    examples = (parser.epilog or "").removeprefix("examples:\n")
    yield "\n".join(("```text", *(line.strip() for line in examples.splitlines()), "```", ""))


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest.upper()}`"
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return f"`{action.option_strings[-1]}{value}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")


PARTS: dict[str, Callable[[], str]] = {
    "gpus": gpus,
    "links": links,
    "hosts": hosts,
    "disks": disks,
    "shares": shares,
    "sources": sources,
}
"""By the names that marks have."""
