"""The benchmark of the dashboard sees slow frames, and what axe-core finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from atombench.common import BenchmarkOptions
from atombench.dashboard import dashboard
from atombench.dashboard.chromium import BROWSER
from atombench.dashboard.dashboard import PAGES, SCREENS, DashboardSetup
from atomtrain.errors import ConfigError

SMALL = DashboardSetup(runs=2, steps=600, peers=20)
BLOCKED_S = 0.4


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
def test_every_page_is_looked_at_on_every_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axe = tmp_path / "axe.min.js"
    axe.write_text("window.axe = {run: async () => ({violations: [{impact: 'serious'}]})}")
    monkeypatch.setattr(dashboard, "AXE", axe)
    until = f"Date.now() + {1000 * BLOCKED_S}"
    slow = f"(() => {{ for (const end = {until}; Date.now() < end;); }})()"
    monkeypatch.setattr(dashboard, "_SCROLL", slow)
    result = dashboard.run(BenchmarkOptions(), SMALL)
    assert result["complaints"] == []
    assert result["screens"].keys() == SCREENS.keys()
    for screen in result["screens"].values():
        assert screen["load_s"] > 0
        assert tuple(screen["pages"]) == PAGES
        for page in screen["pages"].values():
            assert page["frames"] > 1
            assert page["median_frame_s"] <= page["longest_frame_s"]
            assert page["longest_frame_s"] > BLOCKED_S / 2, "frames are told apart by the screen"
    assert result["axe_findings"] == {"serious": len(SCREENS) * len(PAGES)}
    assert result["axe_serious"] == len(SCREENS) * len(PAGES)
    assert result["server_resident_bytes"] > 1 << 20


def test_without_a_browser_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "BROWSER", None)
    with pytest.raises(ConfigError, match="install chromium"):
        dashboard.run(BenchmarkOptions(), SMALL)
