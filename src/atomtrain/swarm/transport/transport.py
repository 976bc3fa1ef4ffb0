"""Streams between peers: the interface of every transport, and the framing of what goes over it.

A transport hands out pairs of `asyncio.StreamReader` and a writer; `Channel` adds framed messages,
bulk bytes, byte counts and deadlines. All failures of the other side or of the way there come out
as `LinkLost`.
"""

from __future__ import annotations

import asyncio
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Protocol, TypeVar

from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.transport import messages
from atomtrain.swarm.transport.identity import Identity
from atomtrain.swarm.transport.messages import Message, Refused
from atomtrain.swarm.transport.rates import Pacer

_LENGTH = struct.Struct(">I")
CHUNK_BYTES = 1 << 18
"""Bytes that a channel is handed in one go."""
_DRAIN_BYTES = 1 << 14
"""Bytes after which a stream is asked whether it has room: slow links move it in seconds."""
_LATE_SHARE = 0.05
"""Of the stall deadline by which a stream may be given up late: so it need not be moved often."""
LEAST_BYTES_PER_S = 100.0
"""What comes slower, on average and beyond one stall deadline, does not come: a tenth of the least
upload limit, which all streams of a peer have in common. So who sends a byte now and then holds
nobody for longer than what is sent would take so."""
OPEN_S = 10.0
"""What opening a stream may take where the caller says nothing."""
_INBOX_MAX = 64
"""More unread messages than any protocol here sends; the rest waits in the stream."""
_INBOX_S = 7200.0
"""Whoever reads from an inbox has a deadline of its own; this one ends forgotten inboxes."""
MessageT = TypeVar("MessageT", bound=Message)


class LinkLost(SwarmError):  # noqa: N818 - an event of every day, not an error of ours
    """The stream to a peer broke, stalled, or could not be opened."""


class PeerRefused(LinkLost):
    """The peer answered that it will not serve this stream."""

    def __init__(self, peer_id: str, answer: Refused) -> None:
        """Keep the peer's answer."""
        super().__init__(f"peer {peer_id[-8:]} refused: {answer.reason}")
        self.answer = answer


class Writer(Protocol):
    """The part of `asyncio.StreamWriter` that is used."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue bytes."""
        ...

    async def drain(self) -> None:
        """Wait until there is room again."""
        ...

    def close(self) -> None:
        """Close both directions."""
        ...


class Channel(ABC):
    """One stream to one peer, for one task at a time in each direction."""

    def __init__(self, remote: str, stall_s: float) -> None:
        """Wrap an open stream; one on which no byte moves for `stall_s` breaks."""
        self.remote = remote
        self.host = ""
        """Where the other side is, if it opened the stream and that is known."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self.arrivals = 0
        """Times that bytes came of what is long, also of a part that is not whole yet."""
        self.pacer = Pacer()
        """Limits what is sent; several channels may have one in common."""
        self.stall: Callable[[], float] = lambda: stall_s
        """Returns for how long nothing may move, as things are now."""
        self._granted_s = stall_s
        self._latest_s = math.inf
        """Until when what is received now has to come, beside the time that its bytes earn."""
        self._coming: asyncio.Timeout | None = None
        self._going: asyncio.Timeout | None = None

    @property
    def stall_s(self) -> float:
        """A stream on which no byte moves for so long breaks."""
        return self.stall()

    @abstractmethod
    async def _write(self, view: memoryview) -> None:
        """Hand over all of `view`, waiting while the stream is full; raises `OSError`.

        Whenever a part has gone, but not all, `_went` is called.
        """

    @abstractmethod
    async def _read_into(self, view: memoryview) -> int:
        """Wait for bytes, write them to `view`; return how many, 0 at the end. Raises `OSError`.

        Whenever some came, also too few to return any, `_came` is called.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the stream; the peer reads an end of file. Idempotent, does not block."""

    async def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            LinkLost: the peer is gone, or takes nothing.
        """
        data = messages.encode(message)
        await self.send_bytes(_LENGTH.pack(len(data)) + data)

    async def receive(
        self,
        kind: type[MessageT],
        within_s: float,
        most_bytes: int = messages.MESSAGE_BYTES_MAX,
    ) -> MessageT:
        """Return the next message, which must be of `kind` and begin within `within_s`.

        Raises:
            LinkLost: the peer is gone, refused, or sent nothing in time.
            BadMessage: it sent something else, or announced more than `most_bytes`.
        """
        message = await self.receive_any(within_s, most_bytes)
        if isinstance(message, Refused):
            raise PeerRefused(self.remote, message)
        if not isinstance(message, kind):
            raise BadMessage(
                f"peer {self.remote[-8:]} sent {type(message).__name__}, not {kind.__name__}"
            )
        return message

    async def receive_any(
        self, within_s: float, most_bytes: int = messages.MESSAGE_BYTES_MAX
    ) -> Message:
        """Return the next message of any kind; raises as `receive` does."""
        head = await self._read_exactly(_LENGTH.size, within_s)
        (length,) = _LENGTH.unpack(head)
        if length > most_bytes:
            raise BadMessage(f"peer {self.remote[-8:]} announced a message of {length} bytes")
        body = bytearray(length)
        await self.receive_into(memoryview(body))
        return messages.decode(bytes(body))

    async def send_bytes(self, data: bytes | memoryview) -> None:
        """Send raw bytes; returns when they are on their way, not when they arrived."""
        view = memoryview(data).cast("B")
        step = min(CHUNK_BYTES, self.pacer.grant_bytes)
        try:
            async with asyncio.timeout(self._patience()) as self._going:
                for start in range(0, len(view), step):
                    chunk = view[start : start + step]
                    if self.pacer.limited:
                        self._going.reschedule(None)  # a turn may take as long as it likes
                        await self.pacer.turn(len(chunk))
                        self._went()
                    await self._write(chunk)
                    self._went()
        except (OSError, TimeoutError, RuntimeError) as error:
            raise self._lost(error) from error
        finally:
            self._going = None
        self.sent_bytes += len(view)

    async def receive_into(self, view: memoryview) -> None:
        """Fill `view`, a writable one of bytes.

        Raises:
            LinkLost: the peer is gone, nothing came for the stall deadline, or less than
                `LEAST_BYTES_PER_S` beyond that.
        """
        filled, patience_s = 0, self._patience()
        self._latest_s = asyncio.get_running_loop().time() + patience_s
        try:
            async with asyncio.timeout(patience_s) as self._coming:
                while filled < len(view):
                    filled += self._counted(
                        await self._read_into(view[filled : filled + CHUNK_BYTES])
                    )
        except (OSError, TimeoutError) as error:
            raise self._lost(error) from error
        finally:
            self._coming = None

    async def receive_some(self, view: memoryview) -> int:
        """Wait, as long as it takes, for bytes; write them to `view`, return how many.

        0 is the end of the stream, said by the peer.

        Raises:
            LinkLost: the peer is gone.
        """
        try:
            count = await self._read_into(view)
        except OSError as error:
            raise self._lost(error) from error
        self.received_bytes += count
        return count

    async def wait_closed(self, within_s: float) -> None:
        """Wait until the peer has read everything and closed; silence for `within_s` is as good."""
        try:
            async with asyncio.timeout(within_s):
                await self._read_into(memoryview(bytearray(1)))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return

    async def _read_exactly(self, count: int, within_s: float) -> bytes:
        data, filled = bytearray(count), 0
        while filled < count:
            filled += await self._read(memoryview(data)[filled:], within_s)
            within_s = self.stall_s
        return bytes(data)

    async def _read(self, view: memoryview, within_s: float) -> int:
        self._latest_s = asyncio.get_running_loop().time() + within_s
        try:
            async with asyncio.timeout(within_s) as self._coming:
                return self._counted(await self._read_into(view))
        except (OSError, TimeoutError) as error:
            raise self._lost(error) from error
        finally:
            self._coming = None

    def _counted(self, count: int) -> int:
        """Return how many bytes were read, of which there must be some."""
        if not count:
            raise LinkLost(f"peer {self.remote[-8:]} closed the stream")
        self.received_bytes += count
        return count

    def _came(self, count: int) -> None:
        self.arrivals += 1
        self._latest_s += count / LEAST_BYTES_PER_S
        self._start_again(self._coming, self._latest_s)

    def _went(self) -> None:
        self._start_again(self._going)

    def _start_again(self, deadline: asyncio.Timeout | None, latest_s: float = math.inf) -> None:
        """Bytes moved: a link may be slow, as long as it is not dead."""
        if deadline is None or deadline.expired():
            return
        ends_s, now_s = deadline.when(), asyncio.get_running_loop().time()
        if ends_s is None or ends_s < min(now_s + self._granted_s, latest_s):
            deadline.reschedule(min(now_s + self._patience(), latest_s))

    def _patience(self) -> float:
        """Return how long to wait from now on for something to move."""
        self._granted_s = self.stall_s  # asked for now and then: frames are many
        return (1.0 + _LATE_SHARE) * self._granted_s

    def _lost(self, error: BaseException) -> LinkLost:
        why = "nothing moved in time" if isinstance(error, TimeoutError) else str(error)
        return LinkLost(f"stream to peer {self.remote[-8:]} failed: {why}")


async def begun(channel: Channel, first: Message) -> Channel:
    """Return a new stream on which the first message was sent; close it where that fails.

    Raises:
        LinkLost: the peer is gone, or takes nothing.
    """
    try:
        await channel.send(first)
    except BaseException:
        channel.close()
        raise
    return channel


class StreamChannel(Channel):
    """A channel over a pair of asyncio's streams."""

    def __init__(
        self, remote: str, reader: asyncio.StreamReader, writer: Writer, stall_s: float
    ) -> None:
        """Wrap an open stream."""
        super().__init__(remote, stall_s)
        self._reader = reader
        self._writer = writer

    def close(self) -> None:
        """Close the stream; the peer reads an end of file. Idempotent, does not block."""
        try:
            self._writer.close()
        except (OSError, RuntimeError):
            return

    async def _write(self, view: memoryview) -> None:
        for start in range(0, len(view), _DRAIN_BYTES):
            # A copy: the transport may keep what it is given for longer than the caller does.
            self._writer.write(bytes(view[start : start + _DRAIN_BYTES]))
            await self._writer.drain()
            self._went()

    async def _read_into(self, view: memoryview) -> int:
        chunk = await self._reader.read(len(view))
        view[: len(chunk)] = chunk
        if chunk:
            self._came(len(chunk))
        return len(chunk)


class Inbox:
    """Reads a channel all the time: the loss of the peer is known even while its owner is busy."""

    def __init__(self, channel: Channel) -> None:
        """Start reading."""
        self._remote = channel.remote
        self._messages: list[Message | LinkLost | BadMessage] = []
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._pump(channel))

    async def peek(self, within_s: float) -> None:
        """Wait until there is a message, or the channel is lost; at most `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                await self._arrived.wait()
        except TimeoutError:
            return

    async def get(self, within_s: float) -> Message:
        """Return the next message.

        Raises:
            LinkLost: the peer is gone, or sent nothing in time.
            BadMessage: it sent something that is not a message.
        """
        await self.peek(within_s)
        if not self._messages:
            raise LinkLost(f"peer {self._remote[-8:]} sent nothing within {within_s:.1f} s")
        first = self._messages[0]
        if isinstance(first, Exception):  # stays: there is nothing after it
            raise first
        self._messages.pop(0)
        if not self._messages:
            self._arrived.clear()
        return first

    def close(self) -> None:
        """Stop reading."""
        self._task.cancel()

    async def _pump(self, channel: Channel) -> None:
        ended: LinkLost | BadMessage | None = None
        while ended is None and len(self._messages) < _INBOX_MAX:
            try:
                self._messages.append(await channel.receive_any(_INBOX_S))
            except (LinkLost, BadMessage) as error:
                ended = error
                self._messages.append(error)
            self._arrived.set()


Handler = Callable[[Channel], Awaitable[None]]


class Transport(Protocol):
    """Carries streams between peers that know each other by id."""

    peer_id: str
    """This peer's id, proved to the other side by the transport where it can."""
    address: str
    """What others can dial."""
    identity: Identity
    """The key that this peer's id names."""

    @property
    def is_local(self) -> bool:
        """Whether only peers of one machine are meant to dial this one: they always can."""
        ...

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        """Say whether a peer has signed `data` with the key that its id names."""
        ...

    async def serve(self, handler: Handler) -> None:
        """Run `handler` in a task for each incoming stream, from now on."""
        ...

    async def open(self, peer_id: str, *, bulk: bool = False, within_s: float = OPEN_S) -> Channel:
        """Return a new stream; `bulk`: much is going to flow over it.

        The caller ends it after `within_s`: where there are several ways, each gets a part of it.

        Raises:
            LinkLost: the peer cannot be reached within the connection deadline.
        """
        ...

    def learn(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Remember where a peer can be dialled."""
        ...

    async def answers(self, address: str, within_s: float) -> bool:
        """Say whether a peer answers in time who dials this address anew.

        Connections that there are do not count.
        """
        ...

    async def refused(self, addresses: Collection[str]) -> bool:
        """Say whether a machine answers at each of these addresses that nobody listens there.

        There is at least one. The caller has a deadline: what answers nothing refuses nothing.
        """
        ...

    async def close(self) -> None:
        """Close everything; nothing is served any more."""
        ...


class Directory(Protocol):
    """The membership records: one per peer, gone when they expire."""

    async def publish(self, record: bytes, expiry_s: float) -> None:
        """Store this peer's record for `expiry_s`."""
        ...

    async def records(self) -> dict[str, bytes]:
        """Return the records of all peers by peer id: each is that peer's own, but only a claim."""
        ...

    async def introduce(self, peer_id: str) -> bool:
        """Make known to each other the records that this peer, and another, know of.

        There has been a stream to the other peer. Returns whether it answered.
        """
        ...


def host_of(address: str) -> str:
    """Return the host that a TCP address without relay names, else an empty string."""
    parts = address.split("/")
    plain = len(parts) > 3 and parts[1] in ("ip4", "dns4") and parts[3] == "tcp"
    return parts[2] if plain and "p2p-circuit" not in parts else ""
