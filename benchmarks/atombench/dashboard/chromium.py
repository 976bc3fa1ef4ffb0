"""Chromium without a window, steered over the DevTools protocol by a pair of pipes.

Protocol: "Chrome DevTools Protocol" (chromedevtools.github.io); with `--remote-debugging-pipe` the
browser reads JSON messages from descriptor 3 and writes them to 4, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE_S = 600.0
"""Only what never happens takes so long, on a machine that stands still for seconds as well."""


class Page:
    """A tab of a browser of its own."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        assert BROWSER is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The descriptors must be 3 and 4 there; bash puts them in their places.
        command = [
            "bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", BROWSER, "--headless",
            "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._count = 0
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions, and requests that failed."""
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.close(self._write)
        self._process.kill()
        self._process.wait(_PATIENCE_S)
        os.close(self._read)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the tab."""
        return self._send(method, parameters, self._session)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def before_pages(self, script: str) -> None:
        """Run a script in every page before its own."""
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def run(self, script: str) -> Any:
        """Return what an expression (or a promise of it) comes to."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, within_s: float = _PATIENCE_S) -> None:
        """Wait until an expression is true."""
        end_s = time.monotonic() + within_s
        while not self.run(script):
            assert time.monotonic() < end_s, f"not within {within_s} s: {script}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "End": 35, "Home": 36}
            text = {"text": "\r"} if key == "Enter" and kind == "rawKeyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type="keyDown" if text else kind, key=key, code=key,
                windowsVirtualKeyCode=codes[key], **text,
            )  # fmt: skip

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """Move the mouse to a place, or press or release its left button there.

        Args:
            kind: `mouseMoved`, `mousePressed` or `mouseReleased`.
            x: Pixels from the left.
            y: Pixels from the top.
            clicks: 2 for a double click.
        """
        held = {"button": "left", "buttons": 1} if kind != "mouseReleased" else {"button": "left"}
        button = held if clicks else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, clickCount=clicks, **button)

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(data["data"]))

    def _send(
        self, method: str, parameters: dict[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], _PATIENCE_S)
            assert ready, "the browser does not answer"
            added = os.read(self._read, 1 << 16)
            assert added, "the browser ended"
            self._rest += added
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, about = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])
        elif method == "Network.loadingFailed" and not about.get("canceled"):
            self.complaints.append(about["errorText"])
