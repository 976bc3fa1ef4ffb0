"""An export on Hugging Face's hub: private, in a repository of its own, never over a public one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from atomtrain.errors import ConfigError, reason_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Answer = TypeVar("Answer")
_SILENT_S = 120.0
"""What the hub may say nothing for; its package would wait for ever."""


class PlannedFile(NamedTuple):
    """A file that an export would have."""

    name: str
    size_bytes: int
    """Without the header, if it holds weights."""


def check_repository(name: str) -> None:
    """Refuse what cannot be the name of a repository.

    Raises:
        ConfigError: it cannot.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push takes ORG/NAME, not {name!r}: {reason_of(error)}") from error
    if "/" not in name:
        raise ConfigError(f"--push takes ORG/NAME, not {name!r}; ORG may be your own name there")


def log_in() -> HfApi:
    """Return the hub, if there is a token and the hub takes it; asked before anything heavy.

    Raises:
        ConfigError: there is no token, the hub does not know it, or cannot be reached.
    """
    from huggingface_hub import HfApi, get_session, get_token

    if get_token() is None:
        raise ConfigError(
            "--push needs a token of Hugging Face; run hf auth login, or set HF_TOKEN"
        )
    api = HfApi()
    get_session().timeout = _SILENT_S
    _asked(api.whoami, "check HF_TOKEN and the network")
    return api


def upload(api: HfApi, repository: str, export: Path) -> str:
    """Upload a folder or a file to a repository, which is made private if it is not there.

    Args:
        api: What `log_in` returned.
        repository: `ORG/NAME`.
        export: What was written.

    Returns:
        Its address.

    Raises:
        ConfigError: the repository is public, or the hub fails or refuses; the export stays.
    """
    again = f"the export is in {export}; upload it with: hf upload {repository} {export} --private"

    def send() -> str:
        address = str(api.create_repo(repository, private=True, exist_ok=True))
        if not api.repo_info(repository).private:
            return ""
        if export.is_dir():
            api.upload_folder(repo_id=repository, folder_path=export)
        else:
            api.upload_file(repo_id=repository, path_or_fileobj=export, path_in_repo=export.name)
        return address

    address = _asked(send, again)
    if not address:
        raise ConfigError(
            f"{repository} is there already and public, so nothing was uploaded; choose another "
            f"--push, or make it private. The export is in {export}"
        )
    return address


def _asked(ask: Callable[[], Answer], otherwise: str) -> Answer:
    try:
        return ask()
    except Exception as error:  # of several libraries, down to sockets
        raise ConfigError(f"the hub cannot be used ({reason_of(error)}); {otherwise}") from error
