"""The web page in a real browser: no complaints, live, for every hand, eye and size of swarm."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atombench.dashboard.chromium import BROWSER, Page
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


DRAWN = "document.querySelectorAll('#chart-loss canvas').length === 1"


@pytest.fixture
def address(run: dict[str, Any]) -> Iterator[str]:
    """The address of a dashboard of the run, by the real command."""
    with serving(run["folder"]) as found:
        yield found


@contextmanager
def serving(*arguments: Path | str) -> Iterator[str]:
    """Lend the address of a dashboard."""
    command = [sys.executable, "-m", "atomtrain.cli.main", "dashboard", *map(str, arguments)]
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
        page.until(DRAWN)
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


def test_lists_that_are_none_do_not_stop_the_page(run: dict[str, Any], address: str) -> None:
    log = run["logs"]["peer-0"]
    log.emit("membership", peers=3, joined="everybody", left=5)
    for strange in ("a text", 5, [5, None]):
        log.emit("round", round=200, fragment=0, members=strange, rejected=strange)
    odd = [{"peer_id": 7, "addresses": [7]}, {"peer_id": None, "addresses": "direct"}]
    write_swarm(run["folder"] / "peer-0", [*rows(["peer-0"]), *odd])
    log.emit("warning", message="the last")
    with Page() as page:
        page.open(address)
        page.until(LIVE)
        page.until("document.getElementById('messages').textContent.includes('the last')")
        show(page, "swarm")
        page.until("document.querySelectorAll('#peers tbody tr').length === 3")
        page.until("document.querySelectorAll('#rounds tbody tr').length === 7")
        page.until("document.getElementById('judged').textContent.includes('made up')")
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
        page.until(DRAWN)
        for _ in range(3):  # past the link that skips, to the second page
            page.press("Tab")
        page.press("Enter")
        page.until("!document.getElementById('page-timeline').hidden")
        assert page.run("document.querySelector('[aria-current]').textContent") == "Timeline"
        show(page, "run")
        page.run("document.querySelector('#chart-loss .plot').focus()")
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
        far = "document.querySelectorAll('#peers tbody tr')[600]"
        assert page.run(f"{far}.innerText") == "peer-600", (
            "what is out of sight can be searched for"
        )
        page.run(f"{far}.scrollIntoView()")
        page.until(f"{far}.cells[2]?.textContent === '1.1k'")
        page.until(f"{marked}.cells.length === 1")
        page.run("document.querySelectorAll('#peers th button')[2].click()")
        page.run("document.querySelectorAll('#peers th button')[2].click()")
        first = "document.querySelector('#peers tbody tr').cells[0].textContent"
        page.until(f"{first} === 'peer-899'")
        assert page.run("document.querySelector('[aria-sort]').textContent") == "steps"
        assert page.complaints == []


POINT_AT_THE_RELAYED_ONE = """
(() => {
  const picture = document.querySelector("#peer-map > svg");
  const [, x, y] = picture.querySelector(".m-relayed").getAttribute("d").match(/^M(.+?) (.+?)h/);
  const place = picture.getBoundingClientRect();
  const at = { clientX: place.left + Number(x) + 4, clientY: place.top + Number(y) + 4 };
  picture.dispatchEvent(new PointerEvent("pointermove", at));
})()
"""


def test_peers_are_marked_by_link_and_speed(run: dict[str, Any], address: str) -> None:
    """Peers 4 and 6 are relayed and out of reach; the last one tells no rate."""
    peers = rows([f"peer-{index}" for index in range(9)])
    del peers[-1]["free_bytes_per_s"]
    write_swarm(run["folder"] / "peer-0", peers)
    with Page() as page:
        page.open(f"{address}#swarm")
        page.until("document.querySelectorAll('#peer-map > svg path').length === 4")
        note = "document.getElementById('map-note').textContent"
        page.until(f"{note} === '8 peers; not shown, since they tell no rates: 1.'")
        drawn = (
            "[...document.querySelectorAll('#peer-map > svg path')].map(p => p.getAttribute('d'))"
        )
        assert [path.count("M") for path in page.run(drawn)] == [5, 1, 1, 1]
        shown = "[...document.querySelectorAll('#peer-map > svg text')].map(t => t.textContent)"
        assert {f"peer-{index}" for index in range(8)} <= set(page.run(shown))
        page.run(POINT_AT_THE_RELAYED_ONE)
        page.until(f"{note}.startsWith('peer-4: 40Mbit/s, 1k tokens/s')")
        write_swarm(run["folder"] / "peer-0", rows([f"peer-{index}" for index in range(1000)]))
        page.until(f"{note}.startsWith('1000 peers')")
        assert page.run("document.querySelectorAll('#peer-map > svg path').length") == 4
        assert page.complaints == []


RECORD_TEXTS = """
window.texts = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
  const { actualBoundingBoxLeft: left, actualBoundingBoxRight: right } = this.measureText(text);
  const at = this.getTransform().transformPoint(new DOMPoint(x, y));
  const { width, height } = this.canvas;
  window.texts.push([text, at.x - left, width - at.x - right, height - at.y]);
  return fillText.call(this, text, x, y, ...rest);
};
"""
"""Notes each text on a canvas, and how far its ends are from the canvas's edges, in pixels."""


@pytest.mark.parametrize("width", [1280, 360])
def test_no_label_is_cut(tmp_path: Path, width: int) -> None:
    log = write_run(tmp_path / "slow", peers=1)["peer-0"]
    for step in range(1, 4):
        log.emit("step", step=100_000 * step, steps=9, loss=1e6 * step, step_s=100.0 * step)
    with serving(tmp_path / "slow") as address, Page(width, 3000) as page:
        page.before_pages(RECORD_TEXTS)
        page.open(address)
        page.until("texts.some(([text]) => text === '1 min 40 s')")
        page.until("texts.some(([text]) => text === '300k')")
        cut = page.run("texts.filter(([, left, right, below]) => Math.min(left, right, below) < 0)")
        assert cut == []


def plot_of(page: Page, chart: str) -> dict[str, float]:
    """Return where a chart's plotting area is, after scrolling to it."""
    over = f"document.querySelector('#{chart} .u-over')"
    page.run(f"{over}.scrollIntoView({{block: 'center'}})")
    return page.run(f"{over}.getBoundingClientRect().toJSON()")


def values(chart: str) -> str:
    return f"document.querySelector('#{chart} .values').innerText"


def test_values_zoom_and_switches(run: dict[str, Any], address: str) -> None:
    with Page() as page:
        page.open(address)
        page.until(DRAWN)
        page.until("document.querySelectorAll('#chart-step canvas').length === 1")
        at = plot_of(page, "chart-loss")
        middle = at["y"] + at["height"] / 2

        def point(share: float) -> None:
            page.mouse("mouseMoved", at["x"] + share * at["width"], middle)

        point(0.0)
        page.until(f"{values('chart-loss')}.startsWith('step 1\\n')")
        shown = page.run(values("chart-loss")).split("\n")
        assert [line.split()[0] for line in shown[1:]] == ["peer-0", "peer-1", "peer-2"]
        assert 5 < float(shown[1].split()[1]) < 7

        page.mouse("mouseMoved", at["x"] + 0.5 * at["width"], middle)
        page.mouse("mousePressed", at["x"] + 0.5 * at["width"], middle, clicks=1)
        page.mouse("mouseMoved", at["x"] + 0.75 * at["width"], middle, clicks=1)
        page.mouse("mouseReleased", at["x"] + 0.75 * at["width"], middle, clicks=1)
        button = "document.querySelector('#chart-step .switches button')"
        page.until(f"!{button}.hidden && {button}.textContent === 'whole run'")
        point(0.01)
        page.until(f"{values('chart-loss')}.match(/^step (60|61)\\n/)")
        point(0.99)
        page.until(f"{values('chart-loss')}.match(/^step (89|90)\\n/)")

        tell_step(run["logs"]["peer-0"], STEPS + 1, random.Random(5))
        page.until("document.getElementById('cards').textContent.includes('121 of')")
        point(0.01)
        page.until(f"{values('chart-loss')}.match(/^step (60|61)\\n/)")  # the zoom stays

        for kind in ("mousePressed", "mouseReleased"):
            page.mouse(kind, at["x"] + 0.5 * at["width"], middle, clicks=1)
        for kind in ("mousePressed", "mouseReleased"):
            page.mouse(kind, at["x"] + 0.5 * at["width"], middle, clicks=2)
        page.until(f"{button}.hidden")
        point(0.999)
        page.until(f"{values('chart-loss')}.startsWith('step 121\\n')")

        before = picture_of(page, "chart-loss")
        for name in ("smooth", "log"):
            buttons = "[...document.querySelectorAll('#chart-loss button')]"
            switch = f"{buttons}.find(one => one.textContent === '{name}')"
            page.run(f"{switch}.click()")
            page.until(f"{picture('chart-loss')} !== {before!r}")
            before = picture_of(page, "chart-loss")
        assert page.run(f"{switch}.getAttribute('aria-pressed')") == "true"
        assert page.complaints == []


def test_a_finger_zooms_sideways(address: str) -> None:
    with Page(360, 740) as page:
        page.call("Emulation.setTouchEmulationEnabled", enabled=True)
        page.open(address)
        page.until(DRAWN)
        at = plot_of(page, "chart-loss")
        y = at["y"] + at["height"] / 2
        for kind, share in (("touchStart", 0.5), ("touchMove", 0.6), ("touchMove", 0.75)):
            points = [{"x": at["x"] + share * at["width"], "y": y}]
            page.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        button = "document.querySelector('#chart-loss .switches button')"
        page.until(f"!{button}.hidden && {button}.textContent === 'whole run'")
        page.run(f"{button}.click()")
        page.until(f"{button}.hidden")
        assert page.complaints == []


def picture(chart: str) -> str:
    return f"document.querySelector('#{chart} canvas')?.toDataURL()"


def picture_of(page: Page, chart: str) -> str:
    found: str = page.run(picture(chart))
    return found


def test_several_runs_are_laid_over_each_other_and_switched_off(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / "runs" / name, peers=2)
    label = "document.querySelector('#chart-loss .plot').getAttribute('aria-label')"
    with serving(tmp_path / "runs") as address, Page() as page:
        page.open(address)
        page.until(f"{label}?.includes('first/peer-1') && {label}.includes('second/peer-0')")
        keys = "[...document.querySelectorAll('#legend button')]"
        assert page.run(f"{keys}.map(b => b.textContent)") == ["first", "second"]
        before = picture_of(page, "chart-loss")
        page.run(f"{keys}[0].click()")
        page.until(f"!{label}.includes('first/peer-1') && {label}.includes('second/peer-1')")
        assert picture_of(page, "chart-loss") != before
        page.run(f"{keys}[0].click()")
        page.until(f"{label}.includes('first/peer-0')")
        assert page.run("document.getElementById('peer').length") == 4
        show(page, "swarm")
        page.until("document.querySelectorAll('#peers tbody tr').length === 2")
        assert page.complaints == []


def test_a_swarm_whose_run_has_ended_says_so(run: dict[str, Any], address: str) -> None:
    with Page() as page:
        page.open(f"{address}#swarm")
        page.until("document.querySelectorAll('#peers tbody tr').length === 3")
        for name, log in run["logs"].items():
            log.emit("run_finished", reason="completed", step=STEPS)
            write_swarm(run["folder"] / name, rows([name, *set(run["logs"]) - {name}]))
        note = "document.getElementById('swarm-note').textContent"
        page.until(f"{note}.startsWith('The run has ended:')")
        news = page.run(
            "[...document.querySelectorAll('#peers tbody tr')].map(row => row.cells[8].textContent)"
        )
        assert all(text.startswith("ended ") for text in news), news


def test_who_was_expelled_is_on_the_swarm_page(address: str) -> None:
    with Page() as page:
        page.open(f"{address}#swarm")
        page.until("document.querySelectorAll('#judged tbody tr').length > 3")
        said = page.run("document.getElementById('judged').innerText")
        assert "its mean is made up" in said
        assert "rejected in round 120" in said


@pytest.mark.parametrize("width", [1280, 360])
def test_the_public_page(run: dict[str, Any], width: int) -> None:
    with serving(run["folder"], "--public") as address, Page(width, 900) as page:
        page.open(address)
        page.until(LIVE)
        page.until(DRAWN)
        page.until("document.querySelectorAll('#leaders tbody tr').length === 3")
        page.until("document.querySelectorAll('#samples li').length === 3")
        assert page.run("document.documentElement.scrollWidth") <= width
        text = page.run("document.body.innerText")
        assert "It was a night 2" in text
        assert DAMAGE not in text
        assert page.complaints == []


def test_the_public_page_needs_no_token_from_anywhere(run: dict[str, Any]) -> None:
    with serving(run["folder"], "--public", "--host", "0.0.0.0") as address:
        port = address.rstrip("/").rpartition(":")[2]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S) as answer:
            assert b"/static/public.js" in answer.read()
    with serving(run["folder"], "--host", "0.0.0.0") as address:
        assert "?token=" in address
