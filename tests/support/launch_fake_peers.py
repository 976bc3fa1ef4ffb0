"""Launches two fake peers, for tests that need the launcher in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from atomtrain.training.launcher import LaunchConfig, PeerCommand, launch_peers
from atomtrain.views.runs.display import Display, DisplayConfig

FAKE_PEER = Path(__file__).with_name("fake_peer.py")


def command(directory: Path, name: str, *options: str) -> PeerCommand:
    """Return the command of a fake peer that writes to `directory`."""
    events = directory / f"{name}.jsonl"

    def argv(address: str | None) -> list[str]:
        where = ["--address", "/here"] if address is None else ["--join", address]
        return [sys.executable, str(FAKE_PEER), str(events), *where, *options]

    return PeerCommand(name=name, argv=argv, events=events, log=directory / "logs" / f"{name}.log")


if __name__ == "__main__":
    folder, options = Path(sys.argv[1]), sys.argv[2:]
    commands = [command(folder, name, *options) for name in ("a", "b")]
    with Display(DisplayConfig(plain_interval_s=0.0)) as display:
        code = launch_peers(commands, display, LaunchConfig(poll_s=0.02))
    sys.exit(code)
