"""The control messages: small frozen records, JSON on the wire, checked field by field.

Nothing here allocates more than `MESSAGE_BYTES_MAX` because of what a peer says. Numbers too large,
strings too long, missing or unknown fields and wrong types all raise `BadMessage`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from atomtrain.errors import SwarmError

MESSAGE_BYTES_MAX = 1 << 20
OPENING_BYTES_MAX = 1 << 14
"""Of the first two messages on a stream, which anybody may send: far more than those need."""
_TEXT_MAX = 4096
_LIST_MAX = 4096
_NUMBER_MAX = 1 << 53


class BadMessage(SwarmError):  # noqa: N818 - what it is reads better than what it raises
    """A peer sent something that this protocol does not allow."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages; `kind` names the class on the wire."""

    kind: ClassVar[str]
    _known: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        """Register the message under the name of its class."""
        cls.kind = cls.__name__
        Message._known[cls.kind] = cls


@dataclass(frozen=True, kw_only=True)
class Open(Message):
    """First on every stream: who may go on is decided by protocol, run and proof of the key."""

    protocol: int
    run: str
    proof: str


@dataclass(frozen=True, kw_only=True)
class Refused(Message):
    """Instead of any answer: why there is none, and which run this peer trains."""

    reason: str
    run: str
    protocol: int


@dataclass(frozen=True, kw_only=True)
class AskManifest(Message):
    """A newcomer asks what the run is."""


@dataclass(frozen=True, kw_only=True)
class ManifestHeader(Message):
    """The manifest follows in `bytes_count` bytes; the proof is that of the peer that gives it.

    `time_s` is the swarm's time.
    """

    bytes_count: int
    digest: str
    proof: str
    time_s: float


@dataclass(frozen=True, kw_only=True)
class AskAnchor(Message):
    """A peer asks for a fragment's anchor as it is now.

    If it has the hash `digest`, what comes before `start_bytes` is there already; any other is
    wanted whole.
    """

    fragment: int
    digest: str
    start_bytes: int


@dataclass(frozen=True, kw_only=True)
class AnchorHeader(Message):
    """The anchor (and velocity, if the run has momentum) follows as raw float32.

    It comes from `start_bytes` on: 0, or what was asked for. `round_id` and what comes after it say
    which round made this anchor: element spans that changed and, for each, whose contributions
    (indices into `members`, separated by spaces) are in it.
    """

    fragment: int
    version: int
    tokens: int
    digest: str
    start_bytes: int
    round_id: str
    members: tuple[str, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    contributors: tuple[str, ...]
    grouped: bool
    """It is that of one of several groups: no velocity comes with it."""


@dataclass(frozen=True, kw_only=True)
class AskStatus(Message):
    """Somebody who looks on asks what this peer knows of the swarm."""


@dataclass(frozen=True, kw_only=True)
class StatusHeader(Message):
    """A JSON object follows in `bytes_count` bytes."""

    bytes_count: int


@dataclass(frozen=True, kw_only=True)
class Ping(Message):
    """Somebody measures the way here: wants the time, and `bytes_count` bytes of no meaning."""

    bytes_count: int


@dataclass(frozen=True, kw_only=True)
class Pong(Message):
    """The swarm's time, this peer's version, and what was asked for follows."""

    time_s: float
    version: str
    bytes_count: int


@dataclass(frozen=True, kw_only=True)
class AskDial(Message):
    """A peer asks whether others can dial it: try this address of its own."""

    address: str


@dataclass(frozen=True, kw_only=True)
class Dialled(Message):
    """What came of it."""

    answered: bool


@dataclass(frozen=True, kw_only=True)
class HoldOn(Message):
    """A peer that cannot be dialled stays on this stream, to be called when others want it."""


@dataclass(frozen=True, kw_only=True)
class Holding(Message):
    """It will be called."""


@dataclass(frozen=True, kw_only=True)
class RelayTo(Message):
    """The stream is to be passed on to a peer that is held; `bulk`: much is going to flow."""

    peer_id: str
    bulk: bool


@dataclass(frozen=True, kw_only=True)
class Call(Message):
    """To a peer that is held: somebody wants it. It opens a stream that begins with the ticket."""

    ticket: str
    caller: str
    bulk: bool


@dataclass(frozen=True, kw_only=True)
class TakeCall(Message):
    """The called peer is here; what follows is for the caller."""

    ticket: str


@dataclass(frozen=True, kw_only=True)
class Joined(Message):
    """To the caller: what follows goes to the called peer, and comes from it."""


@dataclass(frozen=True, kw_only=True)
class Propose(Message):
    """A peer tells the leader that round `round_index` is due."""

    round_index: int


@dataclass(frozen=True, kw_only=True)
class Proposed(Message):
    """The leader's answer: it will invite, or says which round it is at and why not."""

    accepted: bool
    round_index: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Invite(Message):
    """The leader invites a member; the answer must come within `answer_s`.

    `version` is that of the best anchor the leader knows of, which is its own unless it is behind
    itself: a member that is behind fetches it before it answers. So many versions less, `slack`,
    are not behind.
    """

    round_id: str
    round_index: int
    fragment: int
    version: int
    slack: int
    answer_s: float


@dataclass(frozen=True, kw_only=True)
class Ready(Message):
    """The member has its snapshot: which anchor it rests on, and how many tokens it weighs.

    `late`: an earlier anchor than that is what part of its change was learnt from.
    """

    version: int
    tokens: int
    digest: str
    weight: int
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class Decline(Message):
    """The member does not take part, and says at which round it is."""

    reason: str
    round_index: int


@dataclass(frozen=True, kw_only=True)
class Begin(Message):
    """The group is fixed; member j owns the j-th run of slices. Its weights are bounded ones.

    Everything must be held within `exchange_s`. If the round has `bases`, its members' anchors
    differ: contributions are measured from their owners' anchors. The new anchor's version is one
    more than `version`, its tokens are `tokens` and those of the contributors `groups` times.
    """

    round_id: str
    members: tuple[str, ...]
    weights: tuple[int, ...]
    late: tuple[bool, ...]
    exchange_s: float
    bases: bool
    version: int
    tokens: int
    groups: int


@dataclass(frozen=True, kw_only=True)
class Contribution(Message):
    """Opens a lane, by its number among those that the sender opens to the receiver; is answered.

    After it both send the same: where a round has bases, those of their own slices; contributions
    to the other's slices, if they have a weight; the means of their own, each after its `Mean`.

    With Gloo there are no lanes: `lane` is the number of rounds that the process group has had
    which the sender has kept, 0 if there is none, and `Meeting` the answer.
    """

    round_id: str
    lane: int


@dataclass(frozen=True, kw_only=True)
class Change(Message):
    """In rounds that have bases, before each contribution: whether it follows.

    It does not where the base is not believed that it would be measured from.
    """

    follows: bool


@dataclass(frozen=True, kw_only=True)
class Meeting(Message):
    """With Gloo, in place of means: where the process group of the round meets, or has met."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Mean(Message):
    """The owner's answer: the mean over `contributors` (indices in the group) follows.

    No contributors: there is no mean, and nothing follows.
    """

    contributors: tuple[int, ...]
    digest: str


@dataclass(frozen=True, kw_only=True)
class Held(Message):
    """Digest of each slice's mean that the member holds, or an empty string."""

    digests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Commit(Message):
    """The leader's decision: the slices that change."""

    slices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Abandon(Message):
    """The leader's decision: nothing changes."""

    reason: str


def encode(message: Message) -> bytes:
    """Return the message as JSON bytes."""
    body = {field.name: getattr(message, field.name) for field in fields(message)}
    return json.dumps({"kind": message.kind, **body}).encode()


def decode(data: bytes) -> Message:
    """Return the message in `data`.

    Raises:
        BadMessage: it is no message of this protocol.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"a message of {len(data)} bytes; allowed are {MESSAGE_BYTES_MAX}")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadMessage("not an object")
    kind = body.pop("kind", None)
    cls = Message._known.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise BadMessage(f"unknown message {str(kind)[:40]!r}")
    wanted = {field.name: str(field.type) for field in fields(cls)}
    if body.keys() != wanted.keys():
        told = [name[:40] for name in sorted(body)[:20]]
        raise BadMessage(f"{kind} has fields {told}, not {sorted(wanted)}")
    return cls(**{name: _checked(f"{kind}.{name}", body[name], wanted[name]) for name in wanted})


def is_text(value: str) -> bool:
    """Say whether a string can be written as UTF-8: JSON may hold halves of characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked(where: str, value: Any, kind: str) -> Any:
    if kind.startswith("tuple["):
        inner = kind.removeprefix("tuple[").removesuffix(", ...]")
        if not isinstance(value, list) or len(value) > _LIST_MAX:
            raise BadMessage(f"{where} is not a list of at most {_LIST_MAX}")
        return tuple(_checked(where, item, inner) for item in value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str) and len(value) <= _TEXT_MAX and is_text(value):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 <= value <= _NUMBER_MAX:  # false for NaN, too
        if kind == "int" and isinstance(value, int):
            return value
        if kind == "float":
            return float(value)
    raise BadMessage(f"{where} is not a valid {kind}")
