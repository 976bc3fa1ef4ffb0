"""Every command and every piece of Python in the documentation is run, in the pages' order.

What differs from what a user types, and what cannot run here, is in the tables of `doc_place`.
"""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atomtrain.cli.main import main
from atomtrain.events import read_events
from tests.integration.swarm.test_swarm_commands import wait_patiently
from tests.support.doc_commands import PAGES, SHELLS, Block, blocks, command_of
from tests.support.doc_place import (
    ATOM,
    FRESH,
    NAMESPACES,
    NOT_OURS,
    NOT_RUN,
    PYTHON_NOT_RUN,
    PYTHON_WORDS,
    WORDS,
    Founder,
    prepare,
    python_names,
    shrunk,
    write_recipe,
)
from tests.support.network_inputs import SMALLEST
from tests.support.waiting import PATIENCE_S

pytest.importorskip("transformers")
pytest.importorskip("peft")
COMMANDS = {
    page.name: [
        (block.marked, line)
        for block in blocks(page)
        if block.language in SHELLS
        for line in block.lines
        if command_of(line) is not None
    ]
    for page in PAGES
}
SHORT = replace(
    SMALLEST, model=replace(SMALLEST.model, layers=2), micro_batches=(8,), trials=1, trial_s=0.05,
    turns=1, settle_s=0.2, window_s=0.2, alone_s=0.2,
)  # fmt: skip
ADDRESSES = {word for word, changed in WORDS["*"].items() if changed == "ADDRESS"}


def said(line: str) -> str:
    """Return a command as the tables name it."""
    words = command_of(line)
    assert words is not None
    return shlex.join(words)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    wait_patiently(monkeypatch)
    prepare(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [name for name, found in COMMANDS.items() if found])
def test_commands_run(page: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if page == "recipes.md":
        write_recipe(place)
    needs_peer = any(word in line for _, line in COMMANDS[page] for word in ADDRESSES)
    # Where the page begins no run, its other commands look at this one's first peer.
    name = "founder" if any(" --run mine" in line for _, line in COMMANDS[page]) else "peer-0"
    with Founder(place, name) if needs_peer else contextlib.nullcontext() as founder:
        address = founder.address() if founder is not None else ""
        for as_it_stands, line in COMMANDS[page]:
            if (page, said(line)) in NOT_RUN or said(line).startswith(NAMESPACES):
                continue
            if (page, said(line)) in FRESH:
                shutil.rmtree(place / "runs" / "mine" / "peer-0", ignore_errors=True)
            words = command_of(line) or ()
            run(list(words) if as_it_stands else shrunk(words, address), place, capsys)
    if page == "fine-tuning.md":  # the page's runs have learnt something
        for name in ("mine", "chat", "adapted"):
            events = read_events(place / "runs" / name / "peer-0" / "events.jsonl")
            losses = [event["loss"] for event in events if event["event"] == "evaluation"]
            assert losses[-1] < losses[0], name


@pytest.mark.root
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=said(line))
        for page, found in COMMANDS.items()
        for _, line in found
        if said(line).startswith(NAMESPACES) and (page, said(line)) not in NOT_RUN
    ],
)
def test_commands_that_need_namespaces_run(
    line: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes of `--quick` where the page says that; else with none that take longer."""
    if "--quick" not in line:
        monkeypatch.setattr("atombench.network.network.QUICK", SHORT)
    run(shrunk(command_of(line) or (), ""), place, capsys)


def run(command: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command to its end, or, if it goes on until it is stopped, until it shows a run."""
    if command[0] == "dashboard":
        with started(command, place) as process:
            assert process.stdout is not None
            told = process.stdout.readline()
            assert told.startswith("dashboard: http://127.0.0.1:"), told
            with urllib.request.urlopen(told.split()[1], timeout=PATIENCE_S) as answer:
                assert b"<html" in answer.read()
        return
    if command[0] == "watch":
        watch(command, place)
        return
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["atom", *command])
        try:
            code = main(command)
        except SystemExit as ended:  # --help
            code = int(ended.code or 0)
    told = capsys.readouterr()
    assert code == 0, (command, told.err)
    assert told.out, command


@contextlib.contextmanager
def started(command: list[str], place: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*ATOM, *command], cwd=place, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) in (0, 130), command
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE_S)
        assert process.stdout is not None
        process.stdout.close()


def watch(command: list[str], place: Path) -> None:
    """Run a view of the terminal in one, and leave it with its key."""
    outside, inside = pty.openpty()
    terminal = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [*ATOM, *command], cwd=place, env=terminal, stdin=inside, stdout=inside, stderr=inside
    )
    os.close(inside)
    os.set_blocking(outside, False)
    shown, until_s = b"", time.monotonic() + PATIENCE_S
    try:
        while process.poll() is None and time.monotonic() < until_s:
            with contextlib.suppress(BlockingIOError, OSError):
                shown += os.read(outside, 1 << 16)
            if b"mine" in shown:
                with contextlib.suppress(OSError):
                    os.write(outside, b"q")
            time.sleep(0.05)
        assert process.wait(PATIENCE_S) == 0, shown[-500:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE_S)
        os.close(outside)


PYTHON = [block for page in PAGES for block in blocks(page) if block.language == "python"]


@pytest.mark.parametrize(
    "block", [b for b in PYTHON if b.page not in PYTHON_NOT_RUN], ids=lambda block: block.page
)
def test_python_runs(block: Block, place: Path) -> None:
    text = block.text
    for before, after in PYTHON_WORDS.items():
        text = text.replace(before, after)
    names = python_names(block.page)
    try:
        exec(compile(text, block.page, "exec"), names)
    finally:
        if "engine" in names:
            names["engine"].close()


def test_the_tables_name_what_is_there() -> None:
    shown = {(page, said(line)) for page, found in COMMANDS.items() for _, line in found}
    assert not (FRESH | set(NOT_RUN)) - shown
    assert set(PYTHON_NOT_RUN) <= {block.page for block in PYTHON}
    others = {
        line.split()[0]
        for page in PAGES
        for block in blocks(page)
        if block.language in SHELLS
        for line in block.lines
        if command_of(line) is None and not line.startswith("#")
    }
    assert others == set(NOT_OURS)
    plain = [
        line
        for page in PAGES
        for block in blocks(page)
        if block.language not in (*SHELLS, "python", "pycon")
        for line in block.lines
    ]
    assert not [line for line in plain if line.startswith(("atom ", "import "))], (
        "name the language"
    )
