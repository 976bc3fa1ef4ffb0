"""What a peer is told about its swarm, and what a run tells every newcomer about itself."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atomtrain.errors import ConfigError, SwarmError, choices
from atomtrain.swarm.anchors.updates import OuterUpdate
from atomtrain.swarm.codecs.codec import codec_named
from atomtrain.swarm.membership.agenda import GROUP_SIZE, GROUP_SIZE_MIN, MEASURED
from atomtrain.swarm.membership.guards import MEANS, Guard

PROTOCOL = 7
"""Version of everything that travels; peers with another one are turned away."""
MANIFEST_BYTES_MAX = 16 << 20
TRANSPORTS = ("streams", "gloo")
AVERAGES = ("local", "gradient")
"""What rounds average, the default first: changes of local steps, or gradients."""
_LEAST_UPLOAD = 1000.0
_FRAGMENTS_MAX = 100_000
_ELEMENTS_MAX = 1 << 40


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """One peer's place in a swarm. The rules of averaging count where a run is founded only."""

    run: str
    """Name of the run, 1 to 64 letters, digits, `-`, `_` or `.`."""
    name: str = ""
    """What this peer is called in displays; empty: the end of its peer id."""
    listen_host: str = "0.0.0.0"
    """IPv4 address to listen on; 0.0.0.0: all."""
    listen_port: int = 0
    """TCP port to listen on; 0: any free one."""
    announce_host: str | None = None
    """IPv4 address or DNS name that others shall dial; None: chosen from the addresses found."""
    join: tuple[str, ...] = ()
    """Addresses of peers in the run, as `Swarm.address` gives them; one that answers is enough."""
    peers_path: Path | None = None
    """File with the peers that the run has had, kept by each of them: who joins tries those, too.
    None: kept nowhere."""
    discoverable: bool = True
    """Whether to answer those who search the local network for runs."""
    identity_path: Path | None = None
    """File with this peer's key, made if absent; None: a new identity at each start."""
    key_path: Path | None = None
    """File with a secret that all peers of the run share; None: whoever knows an address joins."""
    allow_path: Path | None = None
    """File with the ids of the peers that this one talks to, one a line; None: all."""
    local_steps_per_round: int = 30
    """Local steps (H) in which every fragment is averaged once; 0: as few as the measured times of
    rounds and steps allow, see `Agenda.pace`."""
    outer_learning_rate: float = 1.0
    """Factor on a round's mean change; above 0, at most 2."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer update; at least 0, below 1."""
    overlap_weight: float = 1.0
    """Share of what is learnt while a round goes on that a merge leaves in the parameters; the rest
    comes back with the next anchor. 0 to 1."""
    wire: str = "float16"
    """How changes travel: `float16`, `float32`, `int8`, `int4` or `topk`; see `codec`."""
    average: str = "local"
    """What rounds average: changes of `local` steps, or the `gradient`; see `gradients`."""
    target_batch_tokens: int = 0
    """With `gradient`: tokens of all peers together from one step to the next; at least 1."""
    group_size: int | None = None
    """Members of a round at most; more peers are shuffled into several groups. 0: one group of all;
    None: `default_group_size`. See `groups`."""
    transport: str = "streams"
    """How rounds move their data: `streams` (encrypted, judged, of any wire format), or `gloo`, for
    fast networks whose every machine is trusted; see `gloo`."""
    norm_limit: float = 10.0
    """Contributions above this multiple of the group's median norm are rejected; 0 (none is), or
    at least 2. See `guards`."""
    mean: str = "plain"
    """How contributions are averaged: `plain`, or `clipped` (centred clipping, for swarms in which
    not everybody is trusted; peers should then be of similar speed)."""
    expiry_s: float = 30.0
    """A peer silent for this long is no member any more; at least 1. Clocks must agree to a
    fraction of it."""
    direct: bool = True
    """Whether bulk data may go straight between processes where peers can dial each other: to
    a TCP port of its own, the one after `listen_port` if that is chosen."""
    connect_s: float = 10.0
    """Wait for a connection to a peer, or its answer, until one was measured; see `deadlines`."""
    stall_s: float = 15.0
    """A transfer during which no byte moves for this long is given up, until more was measured."""
    upload_limit_bytes_per_s: float = math.inf
    """Most that this peer sends of averages and state; signs of life come on top. Limits `streams`,
    not `gloo`."""
    relay_limit_bytes_per_s: float = math.inf
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
        allowed = self.run.replace("-", "").replace("_", "").replace(".", "")
        _check(
            0 < len(self.run) <= 64 and allowed.isalnum() and allowed.isascii(),
            "run",
            self.run,
            "1 to 64 letters, digits, '-', '_' or '.'",
        )
        _check(len(self.name) <= 64, "name", self.name, "at most 64 characters")
        _check(0 <= self.listen_port < 65536, "listen_port", self.listen_port, "0 to 65535")
        _check(
            self.local_steps_per_round >= MEASURED,
            "local_steps_per_round",
            self.local_steps_per_round,
            "at least 1, or 0 for as measured",
        )
        lr, momentum = self.outer_learning_rate, self.outer_momentum
        _check(0 < lr <= 2, "outer_learning_rate", lr, "above 0, at most 2")
        _check(0 <= momentum < 1, "outer_momentum", momentum, "at least 0, below 1")
        overlap = self.overlap_weight
        _check(0 <= overlap <= 1, "overlap_weight", overlap, "0 to 1")
        codec_named(self.wire)
        check_transport(self.transport, self.wire, clipped=self.mean == "clipped")
        average, mean = self.average, self.mean
        _check(average in AVERAGES, "average", average, choices(average, AVERAGES))
        _check(
            (self.target_batch_tokens > 0) == (self.average == "gradient"),
            "target_batch_tokens",
            self.target_batch_tokens,
            "at least 1 with gradient averaging, 0 without",
        )
        check_group_size(self.group_size, self.average, self.transport)
        limit = self.norm_limit
        _check(limit == 0 or 2 <= limit < math.inf, "norm_limit", limit, "0, or at least 2")
        _check(mean in MEANS, "mean", mean, choices(mean, MEANS))
        _check(1 <= self.expiry_s <= 3600, "expiry_s", self.expiry_s, "1 to 3600 seconds")
        for key in ("connect_s", "stall_s", "slowest_link_bytes_per_s", "round_floor_s"):
            value = getattr(self, key)
            _check(0 < value < math.inf, key, value, "above 0")
        limit = self.upload_limit_bytes_per_s
        _check(limit >= _LEAST_UPLOAD, "upload_limit_bytes_per_s", limit, "at least 1000")
        limit = self.relay_limit_bytes_per_s
        good = limit == 0 or limit >= _LEAST_UPLOAD
        _check(good, "relay_limit_bytes_per_s", limit, "0, or at least 1000")
        _check(
            self.round_floor_s <= self.round_ceiling_s < math.inf,
            "round_ceiling_s",
            self.round_ceiling_s,
            "at least round_floor_s",
        )


def default_group_size(average: str, transport: str) -> int:
    """Return the size of groups in runs whose founder says nothing about it."""
    return GROUP_SIZE if (average, transport) == (AVERAGES[0], TRANSPORTS[0]) else 0


def check_group_size(size: int | None, average: str, transport: str) -> None:
    """Check that rounds can have groups of at most `size` members (None: the default).

    Raises:
        ConfigError: they cannot.
    """
    if size is None:
        return
    if size != 0 and size < GROUP_SIZE_MIN:
        raise ConfigError(
            f"--group-size must be 0 (one group of all) or at least {GROUP_SIZE_MIN}, not {size}"
        )
    if size and default_group_size(average, transport) == 0:
        way = "--average gradient" if average == "gradient" else f"--transport {transport}"
        raise ConfigError(f"{way} averages all peers in one group; leave --group-size out")


def check_transport(name: str, wire: str | None, *, clipped: bool) -> None:
    """Check that rounds can move data this way, with this wire format (None: its default).

    Raises:
        ConfigError: they cannot.
    """
    _check(name in TRANSPORTS, "transport", name, choices(name, TRANSPORTS))
    if name == "gloo":
        _require_gloo()
        if clipped or wire not in (None, "float32"):
            raise ConfigError(
                f"--transport gloo adds numbers up itself: plain means of float32, not "
                f"{'clipped ones' if clipped else wire}; leave --wire and --clipped-mean out"
            )


def _require_gloo() -> None:
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise ConfigError(
            "--transport gloo needs a PyTorch with torch.distributed and Gloo, and this one has "
            "none; install another build, or leave the option out"
        )


def _check(good: bool, key: str, value: object, allowed: str) -> None:
    if not good:
        raise ConfigError(f"swarm {key} is {value!r}; allowed: {allowed}")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What all peers of a run must do alike for their anchors to stay equal bit for bit."""

    local_steps_per_round: int = 30
    """Local steps in which every fragment is averaged once; 0: as measured."""
    outer_learning_rate: float = 1.0
    """See `OuterUpdate`."""
    outer_momentum: float = 0.0
    """See `OuterUpdate`."""
    overlap_weight: float = 1.0
    """See `AnchorStore`."""
    wire: str = "float16"
    """Name of the codec."""
    average: str = "local"
    """One of `AVERAGES`."""
    target_batch_tokens: int = 0
    """Tokens of a step of all peers together, with `gradient`."""
    group_size: int = 0
    """Members of a round at most; 0: one group of all. See `groups`."""
    transport: str = "streams"
    """One of `TRANSPORTS`."""
    norm_limit: float = 10.0
    """See `Guard`."""
    mean: str = "plain"
    """See `Guard`."""

    @classmethod
    def of(cls, config: SwarmConfig) -> Rules:
        """Return the rules that the founder's configuration sets."""
        return cls(
            local_steps_per_round=config.local_steps_per_round,
            outer_learning_rate=config.outer_learning_rate,
            outer_momentum=config.outer_momentum,
            overlap_weight=config.overlap_weight,
            wire=config.wire,
            group_size=(
                default_group_size(config.average, config.transport)
                if config.group_size is None
                else config.group_size
            ),
            transport=config.transport,
            average=config.average,
            target_batch_tokens=config.target_batch_tokens,
            norm_limit=config.norm_limit,
            mean=config.mean,
        )

    @property
    def guard(self) -> Guard:
        """What owners do with contributions that cannot be honest."""
        return Guard(limit=self.norm_limit, mean=self.mean)

    @property
    def outer(self) -> OuterUpdate:
        """The outer update."""
        return OuterUpdate(learning_rate=self.outer_learning_rate, momentum=self.outer_momentum)


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
            config = SwarmConfig(run=body["run"], **body["rules"])
            if not isinstance(body["payload"], dict):
                raise TypeError("payload must be an object")
            return cls(
                run=config.run,
                fragment_elements=sizes,
                payload=body["payload"],
                rules=Rules.of(config),
                format_version=int(body["format_version"]),
                born_s=_time_of(body["born_s"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SwarmError(f"received a manifest that cannot be read: {error!r}") from error


def _time_of(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise ValueError("not a time")  # NaN is not, either
    return float(value)
