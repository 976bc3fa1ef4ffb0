"""Uploading an export: what the hub is asked for, and what is said where it cannot be used."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atomtrain.errors import ConfigError
from atomtrain.training.tools.hub import check_repository, log_in, upload

NAME = "somebody/model"


class FakeHub:
    """Keeps what it is asked for; nothing leaves the machine."""

    def __init__(self, *, public: bool = False, fault: Exception | None = None) -> None:
        self.public, self.fault = public, fault
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, name: str, **settings: Any) -> str:
        self.calls.append(("create", {"name": name, **settings}))
        return f"https://hub/{name}"

    def repo_info(self, name: str) -> Any:
        return SimpleNamespace(private=not self.public)

    def upload_folder(self, **settings: Any) -> None:
        if self.fault is not None:
            raise self.fault
        self.calls.append(("folder", settings))

    def upload_file(self, **settings: Any) -> None:
        self.calls.append(("file", settings))


def test_a_folder_and_a_file_go_into_a_private_repository(tmp_path: Path) -> None:
    hub: Any = FakeHub()
    assert upload(hub, NAME, tmp_path) == f"https://hub/{NAME}"
    file = tmp_path / "model.gguf"
    file.write_text("")
    upload(hub, NAME, file)
    created = ("create", {"name": NAME, "private": True, "exist_ok": True})
    assert hub.calls == [
        created,
        ("folder", {"repo_id": NAME, "folder_path": tmp_path}),
        created,
        ("file", {"repo_id": NAME, "path_or_fileobj": file, "path_in_repo": "model.gguf"}),
    ]


def test_nothing_goes_into_a_public_repository(tmp_path: Path) -> None:
    hub: Any = FakeHub(public=True)
    with pytest.raises(ConfigError, match="public, so nothing was uploaded"):
        upload(hub, NAME, tmp_path)
    assert [kind for kind, _ in hub.calls] == ["create"]


def test_a_failed_upload_says_where_the_export_is(tmp_path: Path) -> None:
    hub: Any = FakeHub(fault=ConnectionResetError("connection reset\nby peer"))
    with pytest.raises(ConfigError) as caught:
        upload(hub, NAME, tmp_path)
    assert "\n" not in str(caught.value)
    assert f"(connection reset); the export is in {tmp_path}; upload it with: hf upload" in str(
        caught.value
    )


@pytest.mark.parametrize("name", ["model", "a/b/c", "somebody/mo del", ""])
def test_what_is_not_a_repository_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--push takes ORG/NAME"):
        check_repository(name)


def test_without_token_or_network_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="set HF_TOKEN"):
        log_in()
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_made_up")
    nobody = partial(huggingface_hub.HfApi, endpoint="http://127.0.0.1:1", token="hf_made_up")
    monkeypatch.setattr(huggingface_hub, "HfApi", nobody)
    with pytest.raises(ConfigError, match="check HF_TOKEN and the network") as caught:
        log_in()
    assert "\n" not in str(caught.value)


def test_a_hub_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr("atomtrain.training.tools.hub._SILENT_S", 0.05)
    session = huggingface_hub.get_session()
    monkeypatch.setattr(session, "timeout", session.timeout)  # as it was, afterwards
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_made_up")
    with socket.create_server(("127.0.0.1", 0)) as dumb:
        address = f"http://127.0.0.1:{dumb.getsockname()[1]}"
        hub = partial(huggingface_hub.HfApi, endpoint=address, token="hf_made_up")
        monkeypatch.setattr(huggingface_hub, "HfApi", hub)
        with pytest.raises(ConfigError, match="check HF_TOKEN and the network"):
            log_in()
