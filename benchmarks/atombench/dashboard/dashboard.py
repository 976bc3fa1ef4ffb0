"""Benchmark `dashboard`: how quick and clean the page is with long runs and many peers.

Folders of made-up runs are served by the real command and opened in a real Chromium: wide and
light, then narrow and dark, as desktops and phones have it. On each page somebody scrolls from top
to bottom; on the first one also moves the mouse over a curve, zooms and switches to a logarithmic
scale, while the runs go on. A script in the page notes the time from each drawn frame to the next.
axe-core (`npm install axe-core`) looks over each page where it is found.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.dashboard.chromium import BROWSER, Page
from atombench.dashboard.runs import step_told, write_peers, write_run
from atomtrain.errors import ConfigError
from atomtrain.events import EVENTS_FILE, EventLog

PAGES = ("run", "timeline", "memory", "swarm", "plan")
SCREENS = {"desktop, light": (1280, 900, False), "phone, dark": (360, 740, True)}
AXE = Path("node_modules/axe-core/axe.min.js")
SERIOUS = ("serious", "critical")
_NEWS_EVERY_S = 0.5

_FRAMES = """
window.frames_s = [];
requestAnimationFrame(function note(before) {
  requestAnimationFrame((now) => { window.frames_s.push((now - before) / 1000); note(now); });
});
"""
"""Notes how long each frame took, from the first that there is."""
_SCROLL = """
(async () => {
  const bottom = document.documentElement.scrollHeight;
  for (let top = 0; top <= bottom; top += 80) {
    window.scrollTo(0, top);
    await new Promise(requestAnimationFrame);
  }
  window.scrollTo(0, 0);
})()
"""


@dataclass(frozen=True, kw_only=True)
class DashboardSetup:
    """Inputs of the benchmark."""

    runs: int = 10
    steps: int = 100_000
    """Of each run."""
    peers: int = 1000
    """In the table of the first run."""


def run(options: BenchmarkOptions, setup: DashboardSetup | None = None) -> Result:
    """Measure.

    Raises:
        ConfigError: there is no Chromium.
    """
    if BROWSER is None:
        raise ConfigError("this needs a browser; install chromium (apt-get install chromium)")
    quick = DashboardSetup(runs=2, steps=2000, peers=100)
    setup = setup or (quick if options.quick else DashboardSetup())
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        for number in range(setup.runs):
            progress(f"run {number + 1} of {setup.runs} is written")
            write_run(runs / f"run-{number}", setup.steps, number)
        write_peers(runs / "run-0", setup.peers, setup.steps)
        with _served(runs) as (address, server):
            screens = {
                name: _looked_at(address, runs / "run-0", setup, screen)
                for name, screen in SCREENS.items()
            }
            resident_bytes = _resident_bytes(server.pid)
    pages = [page for screen in screens.values() for page in screen["pages"].values()]
    findings: Counter[str] | None = None
    if all(page["axe"] is not None for page in pages):
        findings = sum((Counter(page["axe"]) for page in pages), Counter())
    return {
        "longest_frame_s": max(page["longest_frame_s"] for page in pages),
        "load_s": max(screen["load_s"] for screen in screens.values()),
        "complaints": [text for screen in screens.values() for text in screen["complaints"]],
        "axe_findings": findings,
        "axe_serious": None if findings is None else sum(findings[kind] for kind in SERIOUS),
        "server_resident_bytes": resident_bytes,
        "screens": screens,
        "inputs": asdict(setup),
        **description(),
    }


@contextmanager
def _served(runs: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "atomtrain.cli.main", "dashboard", str(runs), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1], server
        finally:
            server.terminate()


def _looked_at(
    address: str, run: Path, setup: DashboardSetup, screen: tuple[int, int, bool]
) -> Result:
    """Look at all pages on a screen, while a run goes on."""
    width, height, dark = screen
    with Page(width, height, dark=dark) as page:
        page.before_pages(_FRAMES)
        started_s = time.monotonic()
        page.open(address)
        page.until("document.getElementById('connection').textContent === 'live'")
        page.until("document.querySelectorAll('#chart-loss canvas').length === 1")
        load_s = time.monotonic() - started_s
        loading_s = page.run("Math.max(...window.frames_s)")
        with _going_on(run, setup):
            pages = {name: _page(page, name) for name in PAGES}
        axe = AXE.read_text(encoding="utf-8") if AXE.exists() else None
        for name, found in pages.items():
            found["axe"] = None if axe is None else _findings(page, name, axe)
        return {
            "load_s": load_s,
            "longest_frame_loading_s": loading_s,
            "pages": pages,
            "complaints": page.complaints,
        }


def _page(page: Page, name: str) -> Result:
    """Do on a page what people do; return how long its frames were."""
    _show(page, name)
    page.run("window.frames_s.length = 0")
    page.run(_SCROLL)
    if name == "run":
        _over_a_curve(page)
    time.sleep(2 * _NEWS_EVERY_S)  # news come in meanwhile
    frames_s = page.run("window.frames_s")
    return {
        "frames": len(frames_s),
        "longest_frame_s": max(frames_s),
        "median_frame_s": statistics.median(frames_s),
    }


def _over_a_curve(page: Page) -> None:
    over = "document.querySelector('#chart-loss .u-over')"
    page.run(f"{over}.scrollIntoView({{block: 'center'}})")
    at = page.run(f"{over}.getBoundingClientRect().toJSON()")
    middle = at["y"] + at["height"] / 2

    def point(share: float, kind: str = "mouseMoved", clicks: int = 0) -> None:
        page.mouse(kind, at["x"] + share * at["width"], middle, clicks=clicks)

    for place in range(50):
        point(place / 50)
    point(0.4)
    point(0.4, "mousePressed", 1)
    for place in range(40, 61):
        point(place / 100, clicks=1)
    point(0.6, "mouseReleased", 1)
    button = "document.querySelector('#chart-loss .switches button')"
    page.until(f"!{button}.hidden")
    for name in ("log", "smooth"):
        page.run(
            "[...document.querySelectorAll('#chart-loss button')]"
            f".find(one => one.textContent === '{name}').click()"
        )
    page.run(f"{button}.click()")
    page.until(f"{button}.hidden")


def _show(page: Page, name: str) -> None:
    page.run(f"location.hash = '{name}'")
    page.until(f"!document.getElementById('page-{name}').hidden")


def _findings(page: Page, name: str, axe: str) -> dict[str, int]:
    """Return how many kinds of things axe-core finds wrong, by how bad they are."""
    _show(page, name)
    page.run(f"{axe}; undefined")
    found = page.run("axe.run().then(found => found.violations.map(one => one.impact))")
    return dict(Counter(found))


@contextmanager
def _going_on(run: Path, setup: DashboardSetup) -> Iterator[None]:
    """Let a run make steps, and its table of peers change, as long as this lasts."""
    over = threading.Event()

    def go_on() -> None:
        log, source, step = EventLog(run / EVENTS_FILE), random.Random(0), setup.steps
        while not over.wait(_NEWS_EVERY_S):
            step += 1
            log.emit("step", **step_told(step, setup.steps, source))
            write_peers(run, setup.peers, step)
        log.close()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()
