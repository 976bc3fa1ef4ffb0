"""The web page in a real browser: no complaints, live, for every hand, eye and size of swarm."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import BROWSER, Page
from tests.support.dashboard_run import DAMAGE, STEPS, rows, tell_step, write_run, write_swarm
from tests.support.waiting import PATIENCE_S

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
PAGES = ("run", "timeline", "memory", "swarm", "plan")
LIVE = "document.getElementById('connection').textContent === 'live'"


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "made-up"
    return {"folder": folder, "logs": write_run(folder)}


@pytest.fixture
def address(run: dict[str, Any]) -> Iterator[str]:
    """The address of a dashboard of the run, by the real command."""
    command = [sys.executable, "-m", "atomtrain.cli.main", "dashboard", str(run["folder"])]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def show(page: Page, name: str) -> None:
    page.run(f"location.hash = '{name}'")
    page.until(f"!document.getElementById('page-{name}').hidden")


def test_every_page_is_whole_live_and_without_complaint(run: dict[str, Any], address: str) -> None:
    with Page() as page:
        page.open(address)
        page.until(LIVE)
        page.until("document.querySelectorAll('#chart-loss path').length >= 3")
        page.until(f"document.getElementById('messages').textContent.includes('{DAMAGE}')")
        assert page.run("document.querySelectorAll('img').length") == 0
        tell_step(run["logs"]["peer-0"], STEPS + 1, random.Random(5))
        page.until(f"document.getElementById('cards').textContent.includes('{STEPS + 1} of')")
        show(page, "timeline")
        page.until("document.querySelectorAll('#timelines svg rect').length > 20")
        show(page, "memory")
        page.until("document.querySelectorAll('#memory figure').length === 2")
        show(page, "plan")
        page.until("document.getElementById('plan-text').textContent.includes('segments')")
        show(page, "swarm")
        page.until("document.querySelectorAll('#peers tbody tr').length === 3")
        page.until("document.querySelectorAll('#rounds tbody tr').length === 4")
        run["logs"]["peer-0"].emit("run_finished", reason="completed", step=STEPS + 1)
        show(page, "run")
        page.until("document.getElementById('cards').textContent.includes('completed')")
        assert page.complaints == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_every_page_without_scrolling_sideways(address: str, dark: bool) -> None:
    with Page(360, 740, dark=dark) as page:
        page.open(address)
        page.until(LIVE)
        back = page.run("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(13, 17, 23)") is dark
        for name in PAGES:
            show(page, name)
            assert page.run("document.documentElement.scrollWidth") <= 360, name
        assert page.complaints == []


def test_keys_and_screen_readers(address: str) -> None:
    with Page() as page:
        page.open(address)
        page.until(LIVE)
        page.until("document.querySelectorAll('#chart-loss path').length >= 3")
        for _ in range(3):  # past the link that skips, to the second page
            page.press("Tab")
        page.press("Enter")
        page.until("!document.getElementById('page-timeline').hidden")
        assert page.run("document.querySelector('[aria-current]').textContent") == "Timeline"
        show(page, "run")
        page.run("document.querySelector('#chart-loss svg').focus()")
        page.press("End")
        page.press("ArrowLeft")
        readout = "document.querySelector('#chart-loss [role=status]').textContent"
        page.until(f"{readout}.startsWith('at step {STEPS - 1}:')")
        for name in PAGES:
            show(page, name)
            unnamed = [node for node in nodes_to_focus(page) if not node["name"]["value"]]
            assert unnamed == [], name


def nodes_to_focus(page: Page) -> list[dict[str, Any]]:
    """Return what a screen reader is told of everything that can have the focus."""
    tree = page.call("Accessibility.getFullAXTree")["nodes"]

    def focusable(node: dict[str, Any]) -> bool:
        properties = {entry["name"]: entry["value"] for entry in node.get("properties", ())}
        plain = node["role"]["value"] not in ("RootWebArea", "main", "genericContainer", "generic")
        return plain and bool(properties.get("focusable", {}).get("value"))

    return [node for node in tree if not node["ignored"] and focusable(node)]


def test_a_thousand_peers(run: dict[str, Any], address: str) -> None:
    names = [f"peer-{index}" for index in range(1000)]
    write_swarm(run["folder"] / "peer-0", rows(names))
    with Page() as page:
        page.open(f"{address}#swarm")
        page.until("document.querySelectorAll('#peers tbody tr').length === 1000")
        marked = "document.querySelectorAll('#peers tbody tr')[7]"
        page.run(f"{marked}.dataset.kept = 'yes'")
        write_swarm(run["folder"] / "peer-0", rows(names[:900], step=500))
        page.until("document.querySelectorAll('#peers tbody tr').length === 900")
        assert page.run(f"{marked}.dataset.kept") == "yes", "rows are changed in place"
        assert page.run(f"{marked}.cells[2].textContent") == "507"
        page.run("document.querySelectorAll('#peers th button')[2].click()")
        page.run("document.querySelectorAll('#peers th button')[2].click()")
        first = "document.querySelector('#peers tbody tr').cells[0].textContent"
        page.until(f"{first} === 'peer-899'")
        assert page.run("document.querySelector('[aria-sort]').textContent") == "steps"
        assert page.complaints == []
