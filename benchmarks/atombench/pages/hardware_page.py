"""The tables of `docs/hardware.md`, made from the catalogue.

`python -m atombench.pages.hardware_page` writes them into the page.
"""

from __future__ import annotations

from collections.abc import Iterator

from atombench.pages.writing import DOCS, with_part, write_page
from atomtrain.planning import catalogue
from atomtrain.planning.catalogue import GPUS, HOSTS, Gpu, Source, pcie_bytes_per_s
from atomtrain.planning.disk_catalogue import ASSUMED_DISK, DISKS

PAGE = DOCS / "hardware.md"
START = "<!-- tables, written by python -m atombench.pages.hardware_page -->\n"
END = "<!-- end of tables -->\n"
_TYPES = ("fp32", "tf32", "fp16", "bf16")


def tables() -> str:
    """Return the catalogue as Markdown."""
    return "\n".join(
        (*_gpus(), "", *_links(), "", *_hosts(), "", *_disks(), "", *_shares(), "", *_sources(), "")
    )


def with_tables(page: str) -> str:
    """Return a page with its tables replaced by the catalogue's."""
    return with_part(page, START, END, tables())


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


def _disks() -> Iterator[str]:
    yield "## Disks"
    yield ""
    yield "| `--disk` | reads, GB/s | writes, GB/s | each while it does both | as | source |"
    yield "|---|---|---|---|---|---|"
    numbers = _numbers()
    for disk in DISKS.values():
        yield (
            f"| `{disk.name}` | {disk.read_bytes_per_s / 1e9:g} | "
            f"{disk.write_bytes_per_s / 1e9:g} | {100 * disk.both_ways_share:.0f}% | "
            f"{disk.title} | {numbers[disk.source.url]} |"
        )
    yield ""
    yield (
        "Sequential rates of data sheets. What is left of each while a disk reads and writes is "
        "that of one that does one thing at a time. Where no disk was named or measured, "
        f"`{ASSUMED_DISK}` is assumed."
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
    for number, source in enumerate(_all_sources().values(), start=1):
        yield f"{number}. [{source.title}]({source.url}), {source.year}"


def _numbers() -> dict[str, int]:
    """Return the number of each source on the page, by its address."""
    return {url: number for number, url in enumerate(_all_sources(), start=1)}


def _all_sources() -> dict[str, Source]:
    """Return the sources by address, in the order in which the page names them."""
    sources = [source for card in GPUS.values() for source in card.sources]
    sources += [host.source for host in HOSTS.values()]
    sources += [disk.source for disk in DISKS.values()]
    return {source.url: source for source in sources}


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _tera(card: Gpu, dtype: str) -> str:
    return f"{card.flops_per_s[dtype] / 1e12:g}" if dtype in card.flops_per_s else "-"


if __name__ == "__main__":
    write_page(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
