"""The packages that only a swarm needs, which the extra `swarm` installs.

Who trains alone needs none of them, and there is no hivemind for macOS and Windows. Imports nothing
of them.
"""

from __future__ import annotations

import importlib.util

from atomtrain.errors import ConfigError

PACKAGES = ("hivemind", "blake3", "base58", "cryptography", "msgspec")
INSTALL = "pip install 'atomtrain[swarm]'"


def missing_packages() -> list[str]:
    """Return those that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def require_swarm(what: str) -> None:
    """Refuse what needs a swarm where it cannot be had.

    Args:
        what: What was asked for, such as `--join`.

    Raises:
        ConfigError: packages are missing.
    """
    if missing := missing_packages():
        raise ConfigError(
            f"{what} needs packages that are not installed: {', '.join(missing)}; "
            f"run {INSTALL} (on Linux)"
        )
