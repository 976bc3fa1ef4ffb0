"""One HTML page and one picture, made only of the JSON results of benchmarks."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atombench import REGISTRY
from atombench.network.panels import (
    UNFINISHED,
    command,
    network_results,
    rounds_finished,
)
from atombench.report_figure import draw_report
from atomtrain.errors import ConfigError

Results = dict[str, Mapping[str, Any]]
_LONGEST_TABLE = 40
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color-scheme: light dark; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { border-bottom: 1px solid #8884; padding: .2rem .8rem .2rem 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; background: white; }
.wide { overflow-x: auto; }
"""


def read_results(folder: Path) -> Results:
    """Return the results in a folder by their files' names.

    Raises:
        ConfigError: there is no such folder or no result in it, or a file is no JSON object.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"--results {folder}: there is no such folder; give one with JSON results"
        )
    found: Results = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a result: {error}") from error
        if not isinstance(result, dict):
            raise ConfigError(f"{path} is not a result of a benchmark: not a JSON object")
        found[path.stem] = result
    if not found:
        raise ConfigError(
            f"--results {folder}: no *.json in it; write some with "
            f"`atom bench swap --out {folder}/swap.json`"
        )
    return found


def write_report(folder: Path, page: Path) -> Path:
    """Write the page and, beside it, its picture; return the picture's path.

    Raises:
        ConfigError: no results, or the page cannot be written.
    """
    results = read_results(folder)
    picture = page.with_suffix(".png")
    try:
        draw_report(results, picture)
        page.write_text(_page(results, picture.read_bytes()), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {page} cannot be written: {error.strerror}") from error
    return picture


def _page(results: Results, picture: bytes) -> str:
    encoded = base64.b64encode(picture).decode("ascii")
    sections = [section for name, result in results.items() for section in _section(name, result)]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>ATOM: results</title><style>{_STYLE}</style></head><body>",
            "<h1>ATOM: results of its benchmarks</h1>",
            "<p>Made of JSON results only. Each section names its command; "
            "figures of different machines are not comparable.</p>",
            '<img alt="What ATOM reaches against a pipeline, and predicted against measured; '
            f'the tables below hold the same numbers" src="data:image/png;base64,{encoded}">',
            *sections,
            "</body></html>",
        ]
    )


def _section(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{html.escape(name)}</h2>"
    machine = result.get("machine", {})
    if isinstance(machine, Mapping):
        where = ", ".join(
            str(machine[key]) for key in ("processor", "gpu", "os") if machine.get(key)
        )
        cores = f", {machine['cores']} cores" if "cores" in machine else ""
        yield f"<p>{_command(name, result)} on {html.escape(where)}{cores}</p>"
    plain = {key: value for key, value in result.items() if _is_plain(value)}
    if plain:
        rows = [f"<tr><th>{html.escape(k)}</th>{_cell(v)}</tr>" for k, v in plain.items()]
        yield f"<table>{''.join(rows)}</table>"
    for key in ("rows", "cases"):
        listed = result.get(key)
        if key == "rows" and network_results({name: result}) and isinstance(listed, list):
            listed = [{**row, "rounds_finished": rounds_finished(row)} for row in listed]
            yield (
                f"<p>Where no round finished ({UNFINISHED!r} in the picture), ATOM's peers trained "
                "each for itself: that ratio counts for nothing.</p>"
            )
        yield from _table(listed)


def _command(name: str, result: Mapping[str, Any]) -> str:
    """Return the command of a result by its file's name, which begins with the benchmark's."""
    known = [key for key in REGISTRY if name == key or name.startswith(f"{key}-")]
    if not known:
        return "Measured"
    benchmark = max(known, key=len)
    if benchmark == "network" and "asked" in result:
        return f"<code>{html.escape(command(result))}</code>"
    return f"<code>atom bench {html.escape(benchmark)} --json</code>"


def _table(rows: Any) -> Iterator[str]:
    """Yield a list of objects as a table of their plain values."""
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        return
    keys = list(dict.fromkeys(k for row in rows for k, v in row.items() if _is_plain(v)))
    head = "".join(f"<th>{html.escape(key)}</th>" for key in keys)
    body = "".join(
        f"<tr>{''.join(_cell(row.get(key, '')) for key in keys)}</tr>"
        for row in rows[:_LONGEST_TABLE]
    )
    more = len(rows) - _LONGEST_TABLE
    yield f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
    if more > 0:
        yield f"<p>and {more} more rows in the JSON file</p>"


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | bool) or (isinstance(value, str) and len(value) < 100)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f'<td class="number">{value:.5g}</td>'
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td class="number">{value:,}</td>'
    return f"<td>{html.escape(str(value))}</td>"
