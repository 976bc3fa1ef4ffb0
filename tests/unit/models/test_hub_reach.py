"""Whether the hub can be reached: told at once, through proxies too, and not asked in vain."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from atomtrain.cli.main import main
from atomtrain.models.hub_reach import check_in_reach, out_of_reach

HERE = "127.0.0.1"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Be online, with an empty cache and without a proxy."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def open_port() -> Iterator[int]:
    with socket.create_server((HERE, 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_a_hub_that_answers_and_one_that_does_not(
    open_port: int, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{HERE}:{open_port}")
    assert out_of_reach() == ""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{HERE}:{closed_port}")
    assert out_of_reach() == f"{HERE} cannot be reached (Connection refused)"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in out_of_reach()


def test_a_proxy_is_dialled_instead(
    open_port: int, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"https://{HERE}:{closed_port}")
    monkeypatch.setenv("https_proxy", f"http://{HERE}:{open_port}")
    assert out_of_reach() == ""
    monkeypatch.setenv("https_proxy", f"{HERE}:{open_port}")
    assert out_of_reach() == ""
    monkeypatch.setenv("no_proxy", HERE)
    assert "refused" in out_of_reach()
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("https_proxy")
    monkeypatch.setenv("all_proxy", f"socks5://{HERE}:{open_port}")
    assert out_of_reach() == ""


def test_one_that_swallows_everything_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def swallow(*_: object) -> None:
        over.wait()
        raise OSError("too late")

    monkeypatch.setattr(socket, "create_connection", swallow)
    try:
        assert out_of_reach(0.01).endswith("cannot be reached (no answer within 0.01 s)")
    finally:
        over.set()


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--model", "org/name", "--data", "text.txt"),
        ("plan", "org/name"),
        ("data", "inspect", "text.txt", "--model", "org/name"),
    ],
    ids=lambda command: command[0],
)
def test_commands_tell_it_in_one_line_before_anything_heavy(
    command: tuple[str, ...], closed_port: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{HERE}:{closed_port}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a text\n" * 500, encoding="utf-8")
    assert main(list(command)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no folder 'org/name'" in line
    assert f"{HERE} cannot be reached (Connection refused); give the folder of a model" in line
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_what_the_cache_has_is_not_asked_for(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{HERE}:{closed_port}")
    (Path(constants.HF_HUB_CACHE) / "models--org--name").mkdir(parents=True)
    check_in_reach("org/name")
