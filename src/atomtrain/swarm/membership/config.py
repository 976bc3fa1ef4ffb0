"""What a peer is told about its swarm, and what a run tells every newcomer about itself."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomtrain.errors import ConfigError, SwarmError
from atomtrain.settings import is_name, option
from atomtrain.swarm.membership.rules import Rules, check_rule
from atomtrain.swarm.transport.endpoint import Endpoint
from atomtrain.units import parse_rate

if TYPE_CHECKING:
    from atomtrain.swarm.membership.admission import Admission

PROTOCOL = 16
"""Version of everything that travels; peers with another one are turned away."""
MANIFEST_BYTES_MAX = 16 << 20
_LEAST_UPLOAD = 1000.0
_FRAGMENTS_MAX = 100_000
_ELEMENTS_MAX = 1 << 40


def relay_limit_of(limit: str | None, flag: str = "--relay-limit") -> float:
    """Return `--relay-limit` in bytes per second; 0 passes on nothing.

    Raises:
        ConfigError: it is not a rate of at least 8kbit/s, nor `none`.
    """
    if limit is None:
        return math.inf
    if limit == "none":
        return 0.0
    rate = parse_rate(limit, flag)
    if rate < _LEAST_UPLOAD:
        raise ConfigError(f"{flag} must be none or at least 8kbit/s, not {limit}")
    return rate


def _check_upload_limit(flag: str, limit: str) -> None:
    if parse_rate(limit, flag) < _LEAST_UPLOAD:
        raise ConfigError(f"{flag} must be at least 8kbit/s, not {limit}")


def _check_relay_limit(flag: str, limit: str) -> None:
    relay_limit_of(limit, flag)


def _check_key(_: str, path: Path) -> None:
    from atomtrain.swarm.membership.admission import read_secret

    read_secret(path)


def _check_allowed(_: str, path: Path) -> None:
    from atomtrain.swarm.membership.admission import read_allowed

    read_allowed(path)


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """One peer's place in a swarm. Fields with a help text are options of `atom train`."""

    run: str
    """Name of the run, 1 to 64 letters, digits, `-`, `_` or `.`."""
    rules: Rules = field(default_factory=Rules)
    """Rules of averaging, for who starts the run."""
    endpoint: Endpoint = field(default_factory=Endpoint)
    """Where this peer listens, and as whom."""
    name: str = ""
    """What this peer is called in displays; empty: the end of its peer id."""
    join: tuple[str, ...] = ()
    """Addresses of peers in the run, as `Swarm.address` gives them; one that answers is enough."""
    peers_path: Path | None = None
    """File with the peers that the run has had, kept by each of them: who joins tries those, too.
    None: kept nowhere."""
    standing_path: Path | None = None
    """File with what this peer thinks of the others, its own. None: kept nowhere."""
    discoverable: bool = True
    """Whether to answer those who search the local network for runs."""
    key_path: Path | None = option(
        None,
        "File with a secret; only peers that have the same one take part in the run.",
        "FILE",
        check=_check_key,
    )
    allow_path: Path | None = option(
        None,
        "File with the ids of the peers to talk to, one a line. Default: all.",
        "FILE",
        check=_check_allowed,
    )
    expiry_s: float = 30.0
    """A peer silent for this long is no member any more; at least 1. Clocks must agree to a
    fraction of it."""
    upload_limit_bytes_per_s: float = option(
        math.inf,
        "Most that this peer sends to others, such as 8Mbit/s; a little less than the link carries "
        "keeps it usable for everything else. Default: no limit.",
        "RATE",
        check=_check_upload_limit,
    )
    """Most that this peer sends of averages and state; signs of life come on top."""
    relay_limit_bytes_per_s: float = option(
        math.inf,
        "Most that this peer passes on between others, for those behind a NAT, such as 8Mbit/s; "
        "none to pass on nothing. Default: no limit but --upload-limit.",
        "RATE",
        check=_check_relay_limit,
    )
    """Most that this peer passes on between others, for those that cannot be dialled; 0: nothing.
    It counts towards `upload_limit_bytes_per_s`, too."""
    slowest_link_bytes_per_s: float = 125e3
    """Rate on which deadlines are based until a round has been measured."""
    round_floor_s: float = 5.0
    """Shortest deadline for any part of a round until answers of its members were measured."""
    round_ceiling_s: float = 1800.0
    """Longest deadline for any part of a round."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: names the field, the value and what is allowed.
        """
        check_rule(is_name(self.run), "run", self.run, "1 to 64 letters, digits, '-', '_' or '.'")
        check_rule(len(self.name) <= 64, "name", self.name, "at most 64 characters")
        check_rule(1 <= self.expiry_s <= 3600, "expiry_s", self.expiry_s, "1 to 3600 seconds")
        for key in ("slowest_link_bytes_per_s", "round_floor_s"):
            value = getattr(self, key)
            check_rule(0 < value < math.inf, key, value, "above 0")
        limit = self.upload_limit_bytes_per_s
        check_rule(limit >= _LEAST_UPLOAD, "upload_limit_bytes_per_s", limit, "at least 1000")
        limit = self.relay_limit_bytes_per_s
        good = limit == 0 or limit >= _LEAST_UPLOAD
        check_rule(good, "relay_limit_bytes_per_s", limit, "0, or at least 1000")
        check_rule(
            self.round_floor_s <= self.round_ceiling_s < math.inf,
            "round_ceiling_s",
            self.round_ceiling_s,
            "at least round_floor_s",
        )


def admission_of(config: SwarmConfig, peer_id: str) -> Admission:
    """Return a peer's rule of admission; reads the files that the configuration names.

    Raises:
        ConfigError: one of them cannot be used.
    """
    from atomtrain.swarm.membership.admission import Admission, key_of, read_allowed, read_secret

    return Admission(
        run=config.run,
        peer_id=peer_id,
        key=key_of(read_secret(config.key_path), config.run) if config.key_path else None,
        allowed=None if config.allow_path is None else read_allowed(config.allow_path),
    )


@dataclass(frozen=True)
class Manifest:
    """What a newcomer must know to take part in a run."""

    run: str
    """Name of the run."""
    fragment_elements: tuple[int, ...]
    """Number of float32 parameters in each fragment."""
    payload: dict[str, Any] = field(default_factory=dict)
    """Anything JSON-able that training needs: model, tokenizer, hyperparameters."""
    rules: Rules = field(default_factory=Rules)
    """Rules of averaging; set by the founder's configuration."""
    format_version: int = PROTOCOL
    """Version of the protocol."""
    born_s: float = 0.0
    """When the run began, in the swarm's time; 0: nobody knows. See `stamps`."""

    def __post_init__(self) -> None:
        """Check the sizes, which bound everything that is ever received.

        Raises:
            SwarmError: no fragment, or one of impossible size.
        """
        count = len(self.fragment_elements)
        if not 0 < count <= _FRAGMENTS_MAX or not all(
            isinstance(n, int) and 0 < n <= _ELEMENTS_MAX for n in self.fragment_elements
        ):
            raise SwarmError(
                f"manifest of run {self.run!r} has {count} fragments of sizes such as "
                f"{self.fragment_elements[:3]}; allowed: 1 to {_FRAGMENTS_MAX}, none empty"
            )

    def encode(self) -> bytes:
        """Return the manifest as canonical JSON.

        Raises:
            SwarmError: the payload is not JSON, or too large.
        """
        try:
            data = json.dumps(asdict(self), sort_keys=True, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise SwarmError(f"manifest payload is not JSON: {error}") from error
        if len(data) > MANIFEST_BYTES_MAX:
            raise SwarmError(
                f"manifest has {len(data)} bytes; allowed are {MANIFEST_BYTES_MAX}; "
                "put less into its payload"
            )
        return data

    @property
    def digest(self) -> str:
        """Hash of the encoded manifest."""
        import hashlib  # takes a while, and command lines need none

        return hashlib.blake2b(self.encode(), digest_size=16).hexdigest()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Return the manifest that `encode` made.

        Raises:
            SwarmError: it is not one.
        """
        try:
            body = json.loads(data)
            sizes = tuple(body.pop("fragment_elements"))
            run = SwarmConfig(run=body["run"]).run
            if not isinstance(body["payload"], dict):
                raise TypeError("payload must be an object")
            return cls(
                run=run,
                fragment_elements=sizes,
                payload=body["payload"],
                rules=Rules(**body["rules"]),
                format_version=int(body["format_version"]),
                born_s=_time_of(body["born_s"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SwarmError(f"received a manifest that cannot be read: {error!r}") from error


def _time_of(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise ValueError("not a time")  # NaN is not, either
    return float(value)
