"""Configurations of swarms from one flat list of settings, as tests name them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from atomtrain.swarm import Endpoint, Rules, SwarmConfig


def swarm_config(**settings: Any) -> SwarmConfig:
    """Return a configuration, with each setting where it belongs."""
    parts = {
        part: {field.name: settings.pop(field.name) for field in fields(kind)
               if field.name in settings}
        for part, kind in (("rules", Rules), ("endpoint", Endpoint))
    }  # fmt: skip
    return SwarmConfig(
        rules=Rules(**parts["rules"]), endpoint=Endpoint(**parts["endpoint"]), **settings
    )
