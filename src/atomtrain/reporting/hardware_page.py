"""The tables of `docs/hardware.md`, made from the catalogue.

`python -m atomtrain.reporting.hardware_page` writes them into the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from atomtrain.planning import catalogue
from atomtrain.planning.catalogue import GPUS, HOSTS, Gpu, pcie_bytes_per_s

PAGE = Path(__file__).parents[3] / "docs" / "hardware.md"
START = "<!-- tables, written by python -m atomtrain.reporting.hardware_page -->\n"
END = "<!-- end of tables -->\n"
_TYPES = ("fp32", "tf32", "fp16", "bf16")


def tables() -> str:
    """Return the catalogue as Markdown."""
    return "\n".join((*_gpus(), "", *_links(), "", *_hosts(), "", *_shares(), "", *_sources(), ""))


def with_tables(page: str) -> str:
    """Return a page with its tables replaced by the catalogue's."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{tables()}{END}{after}"


def _gpus() -> Iterator[str]:
    yield "## GPUs"
    yield ""
    columns = ("`--gpu`", "memory, GiB", "memory, GB/s", *_TYPES, "PCIe", "host", "sources")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    numbers = _numbers()
    for card in GPUS.values():
        peaks = [_tera(card, dtype) for dtype in _TYPES]
        where = ", ".join(str(numbers[source.url]) for source in card.sources)
        yield (
            f"| `{card.name}` | {card.memory_bytes >> 30} | {card.memory_bytes_per_s / 1e9:g} | "
            f"{' | '.join(peaks)} | {card.pcie_generation} x{card.pcie_lanes} | {card.host} | "
            f"{where} |"
        )
    yield ""
    yield (
        "Peaks are in TFLOP/s of dense matrix products; tf32, fp16 and bf16 on tensor cores, "
        "accumulating in float32; a dash means that there are no units for it."
    )
    yield ""
    for card in GPUS.values():
        if card.note:
            yield f"- `{card.name}`: {card.note}."


def _links() -> Iterator[str]:
    yield "## Links"
    yield ""
    yield "| PCIe | x16, GB/s | x8, GB/s | x4, GB/s |"
    yield "|---|---|---|---|"
    for generation in (3, 4, 5):
        rates = [f"{pcie_bytes_per_s(generation, lanes) / 1e9:.1f}" for lanes in (16, 8, 4)]
        yield f"| {generation} | {' | '.join(rates)} |"
    yield ""
    yield "What one pinned copy in one direction reaches."


def _hosts() -> Iterator[str]:
    yield "## Host memory"
    yield ""
    yield "| name | GB/s of all channels | holds up to, GiB | AdamW, parameters/s | source |"
    yield "|---|---|---|---|---|"
    numbers = _numbers()
    for host in HOSTS.values():
        updates = (
            catalogue.HOST_MEMORY_SHARE
            * host.memory_bytes_per_s
            / catalogue.UPDATE_BYTES_PER_PARAMETER
        )
        yield (
            f"| `{host.name}` | {host.memory_bytes_per_s / 1e9:.1f} | "
            f"{host.most_memory_bytes >> 30} | {updates / 1e9:.2f}e9 | {numbers[host.source.url]} |"
        )


def _shares() -> Iterator[str]:
    yield "## Shares"
    yield ""
    yield "| constant of `planning/catalogue.py` | value |"
    yield "|---|---|"
    for name, value in vars(catalogue).items():
        if name.endswith("_SHARE") or name == "UPDATE_BYTES_PER_PARAMETER":
            said = value if not isinstance(value, dict) else _pairs(value)
            yield f"| `{name}` | {said} |"


def _sources() -> Iterator[str]:
    yield "## Sources"
    yield ""
    seen = {source.url: source for card in GPUS.values() for source in card.sources}
    seen.update({host.source.url: host.source for host in HOSTS.values()})
    for url, number in _numbers().items():
        yield f"{number}. [{seen[url].title}]({url}), {seen[url].year}"


def _numbers() -> dict[str, int]:
    """Return the number of each source on the page, by its address."""
    urls = [source.url for card in GPUS.values() for source in card.sources]
    urls += [host.source.url for host in HOSTS.values()]
    return {url: number for number, url in enumerate(dict.fromkeys(urls), start=1)}


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _tera(card: Gpu, dtype: str) -> str:
    return f"{card.flops_per_s[dtype] / 1e12:g}" if dtype in card.flops_per_s else "-"


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
