"""Whether Hugging Face's hub can be reached, found out within seconds at most.

Its own package tries again for half a minute before it says that there is no network. Nothing heavy
is needed, so that the command line can tell at once.
"""

from __future__ import annotations

import socket
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants

from atomtrain.errors import ConfigError

_WAIT_S = 5.0
"""Slow networks answer within that; one that swallows everything costs it."""


def check_in_reach(name: str) -> None:
    """Refuse a model's id that is not in the local cache while the hub cannot be reached.

    Raises:
        ConfigError: says why it cannot.
    """
    if (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        return  # perhaps not whole: who reads it tells
    if reason := out_of_reach():
        raise not_found(name, reason)


def not_found(name: str, reason: str, lacks: str = "") -> ConfigError:
    """Return what to raise for an id that leads to no model.

    Args:
        name: The id.
        reason: Why none came from the hub; may be empty.
        lacks: What is wrong with what the local cache has; empty: it has nothing.
    """
    return ConfigError(
        f"there is no folder {name!r}, and "
        f"{lacks or 'no such model in the local cache of Hugging Face'}"
        f"{reason and f'; {reason}'}; give the folder of a model"
    )


def out_of_reach(wait_s: float = _WAIT_S) -> str:
    """Return why the hub cannot be asked, as a part of a sentence; empty if it can.

    Only a connection is made, to the proxy where there is one; nothing is sent.
    """
    if constants.HF_HUB_OFFLINE:
        return "nowhere else may be looked, since HF_HUB_OFFLINE is set"
    host, port = _whom_to_dial()
    said: list[str] = []

    def dial() -> None:
        try:
            socket.create_connection((host, port), wait_s).close()
        except OSError as error:
            said.append(error.strerror or str(error))
        else:
            said.append("")

    # Looking up a name knows no deadline, so it may be left behind.
    thread = threading.Thread(target=dial, daemon=True)
    thread.start()
    thread.join(wait_s)
    reason = said[0] if said else f"no answer within {wait_s:g} s"
    return reason and f"{host} cannot be reached ({reason})"


def _whom_to_dial() -> tuple[str, int]:
    """Return host and port of the hub, or of the proxy on the way to it."""
    there = urlsplit(constants.ENDPOINT)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(there.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(there.hostname or ""):
        there = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    return there.hostname or "", there.port or (80 if there.scheme == "http" else 443)
