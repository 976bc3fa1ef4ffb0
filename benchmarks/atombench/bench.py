"""`atom bench`: run one benchmark, or make a page of the results of all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from atombench import REGISTRY, benchmark
from atomtrain.cli.parsing import parse
from atomtrain.errors import ConfigError
from atomtrain.settings import option

_EXAMPLES = """\
  atom bench swap --json --out swap.json
  atom bench depth --quick
  atom bench network --peers 4 --out network.json
  atom bench network --link 100Mbit/s,50ms,0.5% --link rtx-3090,100Mbit/s,30ms
  atom bench report --results benchmarks/results --out report.html"""

_REPORT_EXAMPLES = """\
  atom bench report
  atom bench report --results my-results --out my-report.html"""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What a user can say to `atom bench`."""

    name: str = option(None, f"One of {', '.join(REGISTRY)}.", "NAME")
    json: bool = option(False, "Print exactly one JSON object instead of a table.")
    quick: bool = option(False, "Smaller and shorter: under a minute.")
    out: Path | None = option(None, "Also write the JSON object to this file.", "FILE")
    picture: Path | None = option(
        None, "With network and time-to-loss: also draw the result.", "FILE.png"
    )
    peers: int | None = option(
        None,
        "With network and time-to-loss (default: 2) and churn (default: 3): number of peers.",
        "N",
    )
    links: str = option(
        "all",
        "With network: all, plain, stand-ins (links that stand for a GPU's), or alone (the swarm "
        "against its peers alone).",
        "WHICH",
    )
    link: tuple[str, ...] = option(
        (),
        "With network: measure this link, such as 100Mbit/s,50ms,0.5% or "
        "rtx-3090,100Mbit/s,30ms,gpt3-xl; may be repeated.",
        "RATE[,TRIP][,LOSS]",
    )
    kills: int | None = option(None, "With churn: peers to kill. Default: 20.", "N")
    at_once: int | None = option(
        None, "With churn: peers to kill at the same time. Default: 1.", "N"
    )
    device: str | None = option(
        None,
        "With offloaders: cpu or cuda. Default: cuda if there is one. With families: the same. "
        "Default: cpu.",
        "DEVICE",
    )
    device_memory: str | None = option(
        None, "With offloaders and large: budget on the device, such as 8GiB.", "SIZE"
    )
    case: tuple[int, ...] = option(
        (), "With plan: run this case only, from 1; may be repeated.", "NUMBER"
    )
    costs: bool = option(
        False, "With liars: measure what defences cost again; the rows stay as --out has them."
    )
    model: str | None = option(
        None,
        "With large: a preset. Default: gpt3-6.7b. With families: the only one, such as llama.",
        "NAME",
    )
    optimizer: str | None = option(
        None, "With large: an optimizer. Default: the most exact AdamW that fits the host.", "NAME"
    )
    micro_batches: int | None = option(None, "With large: of a step. Default: 16.", "N")
    steps: int | None = option(None, "With large: counted steps. Default: 3.", "N")
    beside: Path | None = option(
        None, "With opening: another checkout of ATOM, measured in turn.", "DIR"
    )


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What a user can say to `atom bench report`."""

    results: Path = option(
        Path("benchmarks/results"), "Folder with what `atom bench NAME --out FILE` wrote.", "DIR"
    )
    out: Path = option(
        Path("report.html"), "The page; a picture of the same name ends in .png.", "FILE"
    )


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    if arguments[:1] == ["report"]:
        return _report(arguments[1:])
    width = max(map(len, REGISTRY))
    about = "Measure; each benchmark prints one result.\n\n" + "\n".join(
        f"  {name:<{width}} {entry.help}" for name, entry in REGISTRY.items()
    )
    about += f"\n\n  {'report':<{width}} a page with pictures, made of the results of the others"
    options = parse(
        BenchOptions,
        arguments,
        prog="atom bench",
        about=about,
        examples=_EXAMPLES,
        positional=("name",),
    )
    entry = benchmark(options.name)
    from atombench.common import BenchmarkOptions, report

    _check_taken(options, entry.takes)
    _check_picture(options.picture, options.name)
    settings = BenchmarkOptions(
        quick=options.quick,
        out=options.out,
        json=options.json,
        peers=options.peers,
        links=options.links,
        link=options.link,
        kills=options.kills,
        at_once=options.at_once,
        device=options.device,
        device_memory=options.device_memory,
        case=options.case,
        costs=options.costs,
        model=options.model,
        optimizer=options.optimizer,
        micro_batches=options.micro_batches,
        steps=options.steps,
        beside=options.beside,
    )
    result = entry.run(settings)
    report(result, json=options.json, out=options.out, text=entry.text(result))
    if options.picture is not None:
        entry.draw(result, options.picture)
        sys.stderr.write(f"{options.picture}\n")
    return 0 if result.get("complete", True) else 130


def _check_taken(options: BenchOptions, taken: Sequence[str]) -> None:
    """Refuse what would say nothing to this benchmark."""
    of_some = {name for entry in REGISTRY.values() for name in entry.takes}
    for field in fields(options):
        name = field.name
        if name in of_some and name not in taken and getattr(options, name) != field.default:
            others = " and ".join(key for key, entry in REGISTRY.items() if name in entry.takes)
            raise ConfigError(
                f"the benchmark {options.name!r} takes no --{name.replace('_', '-')}, which is of "
                f"{others}; leave it out"
            )


def _check_picture(path: Path | None, name: str) -> None:
    """Complain before the measurement, not after it."""
    if path is None:
        return
    drawn = [each for each, entry in REGISTRY.items() if entry.shown_by]
    if name not in drawn:
        raise ConfigError(f"the benchmark {name!r} draws no --picture; {' and '.join(drawn)} do")
    if path.suffix not in (".png", ".svg", ".pdf") or not path.parent.is_dir():
        raise ConfigError(
            f"--picture {path} cannot be drawn; give a file that ends in .png, .svg or .pdf, in a "
            "folder that exists"
        )


def _report(arguments: Sequence[str]) -> int:
    """Make a page of results; return the exit code."""
    options = parse(
        ReportOptions,
        arguments,
        prog="atom bench report",
        about="Write one page, with a picture, of the results in a folder. Nothing is measured.",
        examples=_REPORT_EXAMPLES,
    )
    from atombench.report import write_report

    picture = write_report(options.results, options.out)
    sys.stdout.write(f"{options.out}\n{picture}\n")
    return 0
