"""The control messages: small frozen records, JSON on the wire, checked as they are read.

Nothing here allocates more than `MESSAGE_BYTES_MAX` because of what a peer says. Numbers too large,
strings too long, missing or unknown fields and wrong types all raise `BadMessage`.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec
from msgspec import Meta

from atomtrain.errors import BadMessage

MESSAGE_BYTES_MAX = 1 << 20
OPENING_BYTES_MAX = 1 << 14
"""Of the first two messages on a stream, which anybody may send: far more than those need."""
_TOLD_MAX = 400
_LIST = Meta(max_length=4096)
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Real = Annotated[float, Meta(ge=0.0, le=2.0**53)]
Text = Annotated[str, Meta(max_length=4096)]
Counts = Annotated[tuple[Count, ...], _LIST]
Texts = Annotated[tuple[Text, ...], _LIST]
Flags = Annotated[tuple[bool, ...], _LIST]
Reals = Annotated[tuple[Real, ...], _LIST]


class Message(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag=True,
    forbid_unknown_fields=True,
):
    """Base of all messages; `kind` names the class on the wire."""


class Open(Message, frozen=True, kw_only=True):
    """First on every stream: who may go on is decided by protocol, run and proof of the key."""

    protocol: Count
    run: Text
    proof: Text


class Refused(Message, frozen=True, kw_only=True):
    """Instead of any answer: why there is none, and which run this peer trains."""

    reason: Text
    run: Text
    protocol: Count


class AskManifest(Message, frozen=True, kw_only=True):
    """A newcomer asks what the run is."""


class ManifestHeader(Message, frozen=True, kw_only=True):
    """The manifest follows in `bytes_count` bytes; the proof is that of the peer that gives it.

    `time_s` is the swarm's time.
    """

    bytes_count: Count
    digest: Text
    proof: Text
    time_s: Real


class Certificate(Message, frozen=True, kw_only=True):
    """What members of a round sign of the anchor that it has made; see `anchors/certificate.py`.

    `parent` is the digest of the anchor that it was made of, empty where members had different
    ones. `signatures` are in the order of `members`, in hexadecimal digits, or empty: not there.
    """

    fragment: Count
    version: Count
    tokens: Count
    digest: Text
    parent: Text
    members: Texts
    signatures: Texts


Chain = Annotated[tuple[Certificate, ...], Meta(max_length=16)]


class AskCertificate(Message, frozen=True, kw_only=True):
    """A peer asks for what this one has of the certificate of an anchor."""

    fragment: Count
    digest: Text


class Certificates(Message, frozen=True, kw_only=True):
    """It, whoever has signed yet, and those of the anchors before it; empty: there is none."""

    chain: Chain


class AskAnchor(Message, frozen=True, kw_only=True):
    """A peer asks for a fragment's anchor as it is now.

    If it has the hash `digest`, what comes before `start_bytes` is there already; any other is
    wanted whole.
    """

    fragment: Count
    digest: Text
    start_bytes: Count


class AnchorHeader(Message, frozen=True, kw_only=True):
    """The anchor (and velocity, if the run has momentum) follows as raw float32.

    It comes from `start_bytes` on: 0, or what was asked for. `round_id` and what comes after it say
    which round made this anchor: element spans that changed and, for each, whose contributions
    (indices into `members`, separated by spaces) are in it.
    """

    fragment: Count
    version: Count
    tokens: Count
    digest: Text
    start_bytes: Count
    round_id: Text
    members: Texts
    starts: Counts
    stops: Counts
    contributors: Texts
    grouped: bool
    """It is that of one of several groups: no velocity comes with it."""
    certificate: Certificate | None = None


class AskKnown(Message, frozen=True, kw_only=True):
    """A newcomer asks whether this peer has, or had, the anchor that another one gives it."""

    fragment: Count
    version: Count
    tokens: Count
    digest: Text


class Known(Message, frozen=True, kw_only=True):
    """Whether it has been this peer's own."""

    known: bool


class AskStatus(Message, frozen=True, kw_only=True):
    """Somebody who looks on asks what this peer knows of the swarm."""


class StatusHeader(Message, frozen=True, kw_only=True):
    """A JSON object follows in `bytes_count` bytes."""

    bytes_count: Count


class Ping(Message, frozen=True, kw_only=True):
    """Somebody measures the way here: wants the time, and `bytes_count` bytes of no meaning."""

    bytes_count: Count


class Pong(Message, frozen=True, kw_only=True):
    """The swarm's time, this peer's version, and what was asked for follows."""

    time_s: Real
    version: Text
    bytes_count: Count


class AskDial(Message, frozen=True, kw_only=True):
    """A peer asks whether others can dial it: try this address of its own."""

    address: Text


class Dialled(Message, frozen=True, kw_only=True):
    """What came of it."""

    answered: bool


class HoldOn(Message, frozen=True, kw_only=True):
    """A peer that cannot be dialled stays on this stream, to be called when others want it."""


class Holding(Message, frozen=True, kw_only=True):
    """It will be called."""


class RelayTo(Message, frozen=True, kw_only=True):
    """The stream is to be passed on to a peer that is held; `bulk`: much is going to flow."""

    peer_id: Text
    bulk: bool


class Call(Message, frozen=True, kw_only=True):
    """To a peer that is held: somebody wants it. It opens a stream that begins with the ticket."""

    ticket: Text
    caller: Text
    bulk: bool


class TakeCall(Message, frozen=True, kw_only=True):
    """The called peer is here; what follows is for the caller."""

    ticket: Text


class Joined(Message, frozen=True, kw_only=True):
    """To the caller: what follows goes to the called peer, and comes from it."""


class Propose(Message, frozen=True, kw_only=True):
    """A peer tells the leader that round `round_index` is due."""

    round_index: Count


class Proposed(Message, frozen=True, kw_only=True):
    """The leader's answer: it will invite, or says which round it is at and why not."""

    accepted: bool
    round_index: Count
    reason: Text


class Invite(Message, frozen=True, kw_only=True):
    """The leader invites a member; the answer must come within `answer_s`.

    `version` is that of the best anchor the leader knows of, which is its own unless it is behind
    itself: a member that is behind fetches it before it answers. So many versions less, `slack`,
    are not behind.
    """

    round_id: Text
    round_index: Count
    fragment: Count
    version: Count
    slack: Count
    answer_s: Real


class Ready(Message, frozen=True, kw_only=True):
    """The member has its snapshot: which anchor it rests on, and how many tokens it weighs.

    `late`: an earlier anchor than that is what part of its change was learnt from. `certificate` is
    that of the anchor, as far as the member has it.
    """

    version: Count
    tokens: Count
    digest: Text
    weight: Count
    late: bool
    certificate: Certificate | None = None


class Decline(Message, frozen=True, kw_only=True):
    """The member does not take part, and says at which round it is."""

    reason: Text
    round_index: Count


class Begin(Message, frozen=True, kw_only=True):
    """The group is fixed; member j owns the j-th run of slices. Its weights are bounded ones.

    Everything must be held within `exchange_s`. If the round has `bases`, its members' anchors
    differ: contributions are measured from their owners' anchors. The new anchor's version is one
    more than `version`, its tokens are `tokens` and those of the contributors `groups` times.
    """

    round_id: Text
    members: Texts
    weights: Counts
    late: Flags
    exchange_s: Real
    bases: bool
    version: Count
    tokens: Count
    groups: Count


class Contribution(Message, frozen=True, kw_only=True):
    """Opens a lane, by its number among those that the sender opens to the receiver; is answered.

    `group` is the hash of the `Begin` that the sender has got: both must have the same. With
    `commitments` it is bound to what itself contributes to its own slices on the lane, before it
    hears of anybody else's; empty texts where it has no weight.

    After it both send the same: where a round has bases, those of their own slices; contributions
    to the other's slices, if they have a weight, each followed by its `Seal`; the means of their
    own, each after its `Mean`; an `Audit`, and the `Evidence` that the other's asks for.
    """

    round_id: Text
    lane: Count
    group: Text
    commitments: Texts


class Seal(Message, frozen=True, kw_only=True):
    """After a contribution: a commitment to it, signed, so that it can be shown."""

    commitment: Text
    signature: Text


class Change(Message, frozen=True, kw_only=True):
    """In rounds that have bases, before each contribution: whether it follows.

    It does not where the base is not believed that it would be measured from.
    """

    follows: bool


class Mean(Message, frozen=True, kw_only=True):
    """The owner's answer: the mean over `contributors` (indices in the group) follows.

    No contributors: there is no mean, and nothing follows. `shares` say what each contributor
    counts where that is not as its weight says, `commitments` what each has sealed. The owner signs
    all of it, with the slice and the hash of the group: it is bound to its mean.
    """

    contributors: Counts
    digest: Text
    shares: Reals
    commitments: Texts
    signature: Text


class Audit(Message, frozen=True, kw_only=True):
    """To an owner: show these chunks, one of each slice, of all contributions that its mean has."""

    slices: Counts
    chunks: Counts


class Evidence(Message, frozen=True, kw_only=True):
    """For a chunk: by contributor, its signature, and the way from the chunk to its root.

    The chunks follow, float32, in the same order.
    """

    signatures: Texts
    paths: Texts


class AskAgain(Message, frozen=True, kw_only=True):
    """To a member, when its exchange is over: its contributions to a proven liar's slices.

    It is answered with `Heard`: whether the proof is wanted. When that has come, or was not needed,
    this message comes back, and what is asked for. `owner` is the liar's index in the group.
    """

    round_id: Text
    owner: Count


class Accuse(Message, frozen=True, kw_only=True):
    """A member has seen that a peer, as an owner, has lied, and can prove it."""

    peer_id: Text


class Heard(Message, frozen=True, kw_only=True):
    """Whether the proof is wanted: it is not where the peer counts as gone already."""

    wanted: bool


class Proof(Message, frozen=True, kw_only=True):
    """All that shows an owner's mean of a slice to be wrong; who was not there can check it.

    The pieces of the mean follow as they travelled, then the chunk of each contribution, float32.
    """

    begin: Begin
    fragment: Count
    slice_index: Count
    base_digest: Text
    mean: Mean
    chunk: Count
    evidence: Evidence


class Held(Message, frozen=True, kw_only=True):
    """Digest of each slice's mean that the member holds, or an empty string.

    No digests at all: the member takes back what it said, and will say anew what it holds. The
    leader answers with the same if it has not decided yet.
    """

    digests: Texts


TAKEN_BACK = Held(digests=())


class Commit(Message, frozen=True, kw_only=True):
    """The leader's decision: the slices that change, and who was invited and took no part."""

    slices: Counts
    absent: Texts


class Abandon(Message, frozen=True, kw_only=True):
    """The leader's decision: nothing changes."""

    reason: Text


_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(
    Union[tuple(Message.__subclasses__())]  # noqa: UP007 - of as many as there are
)


def encode(message: Message) -> bytes:
    """Return the message as JSON bytes."""
    return msgspec.json.encode(message)


def decode(data: bytes) -> Message:
    """Return the message in `data`.

    Raises:
        BadMessage: it is not a message of this protocol.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"a message of {len(data)} bytes; allowed are {MESSAGE_BYTES_MAX}")
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadMessage(f"not a message: {str(error)[:_TOLD_MAX]}") from error
