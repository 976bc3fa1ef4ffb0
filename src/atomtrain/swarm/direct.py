"""Straight streams for bulk data: TCP with TLS 1.3 from process to process.

The daemon's streams reach every peer, also behind a firewall, but each byte passes two more
processes. Where peers can dial each other, bulk data goes straight instead. What is needed for that
is told over the daemon's streams, which prove who is at the other end: the listener's port, the
hash of its certificate, and a token that stands for the caller. So both sides know each other as
well as on the stream that they asked over. Where it does not work, the daemon's streams do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import socket
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from atomtrain.swarm.messages import BadMessage
from atomtrain.swarm.secure import SecureChannel, shake_hands
from atomtrain.swarm.transport import Channel, Handler, LinkLost

_log = logging.getLogger("atomtrain.swarm")
OFFER_BYTES = 256
"""Bytes of an offer as it travels, filled up with blanks."""
_TOKEN_BYTES = 32
_TOKENS_MAX = 8192
_GREETINGS_MAX = 256
_GREETING_S = 10.0
_CONNECT_S = 3.0
_AVOID_S = 60.0
_YEARS = timedelta(days=3650)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """How one peer may open straight streams to another."""

    port: int
    certificate: str
    """SHA-256 of the listener's certificate, hexadecimal."""
    token: str
    """Hexadecimal; whoever shows it is the peer that it was given to."""

    def encode(self) -> bytes:
        """Return the offer as JSON of `OFFER_BYTES`."""
        return json.dumps(asdict(self)).encode().ljust(OFFER_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        """Return the offer in `data`.

        Raises:
            BadMessage: there is none.
        """
        try:
            body = json.loads(data)
            port, certificate, token = body["port"], body["certificate"], body["token"]
            good = type(port) is int and 0 < port < 65536 and len(bytes.fromhex(certificate)) == 32
            if not good or len(bytes.fromhex(token)) != _TOKEN_BYTES:
                raise ValueError("a field out of range")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadMessage(f"an offer that cannot be read: {error!r}") from error
        return cls(port=port, certificate=certificate, token=token)


class Direct:
    """One peer's straight streams: a listener, and the way to those of others."""

    def __init__(
        self, host: str, port: int, stall_s: float, ask: Callable[[str], Awaitable[bytes]]
    ) -> None:
        """Listen on `host`; `port` 0 is any free one.

        `ask` returns what a peer answers, over a stream that proves its identity and this peer's,
        to the question for an offer; it raises `LinkLost`.

        Raises:
            OSError: the port is in use.
        """
        self._ask = ask
        self._stall_s = stall_s
        self._server, self._certificate = _server_context()
        self._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._client.minimum_version = ssl.TLSVersion.TLSv1_3
        self._client.check_hostname = False
        self._client.verify_mode = ssl.CERT_NONE  # its hash is compared instead
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setblocking(False)
        self._peers: dict[str, str] = {}  # by token
        self._tokens: dict[str, str] = {}  # by peer
        self._offers: dict[str, Offer] = {}
        self._avoid_until_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._greetings = 0

    def offer(self, peer_id: str) -> Offer:
        """Return the offer to a peer whose identity is proved."""
        token = self._tokens.get(peer_id)
        if token is None:
            if len(self._tokens) >= _TOKENS_MAX:
                del self._peers[self._tokens.pop(next(iter(self._tokens)))]
            token = self._tokens[peer_id] = secrets.token_hex(_TOKEN_BYTES)
            self._peers[token] = peer_id
        port: int = self._listener.getsockname()[1]
        return Offer(port=port, certificate=self._certificate, token=token)

    def serve(self, handler: Handler) -> None:
        """Run `handler` for each incoming stream, from now on."""
        self._spawn(self._accept(handler))

    async def open(self, peer_id: str, hosts: Iterable[str]) -> Channel | None:
        """Return a stream to a peer at one of `hosts`, or None if there is no straight way now."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._avoid_until_s.get(peer_id, 0.0):
            return None
        known = self._offers.get(peer_id)
        try:
            if known is not None:
                with contextlib.suppress(OSError, TimeoutError):
                    return await self._connect(peer_id, hosts, known)
            return await self._connect(peer_id, hosts, await self._asked(peer_id, known))
        except (OSError, TimeoutError, LinkLost, BadMessage) as error:
            _log.info("no straight stream to peer %s (%s)", peer_id[-8:], error)
            self._offers.pop(peer_id, None)
            self._avoid_until_s[peer_id] = loop.time() + _AVOID_S
            return None

    def close(self) -> None:
        """Stop listening; streams that are open stay."""
        for task in self._tasks:
            task.cancel()
        self._listener.close()

    async def _asked(self, peer_id: str, stale: Offer | None) -> Offer:
        async with self._asking.setdefault(peer_id, asyncio.Lock()):
            if self._offers.get(peer_id) is stale:
                async with asyncio.timeout(_GREETING_S):
                    self._offers[peer_id] = Offer.decode(await self._ask(peer_id))
            return self._offers[peer_id]

    async def _connect(self, peer_id: str, hosts: Iterable[str], offer: Offer) -> Channel:
        """Open a stream; raises `OSError` or `TimeoutError`."""
        failed: OSError = OSError("it has no address")
        for host in hosts:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await self._connect_to(peer_id, host, offer)
            except TimeoutError:
                failed = OSError(f"{host}:{offer.port} does not answer")
            except OSError as error:
                failed = error
        raise failed

    async def _connect_to(self, peer_id: str, host: str, offer: Offer) -> Channel:
        loop = asyncio.get_running_loop()
        plain = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        plain.setblocking(False)
        try:
            await loop.sock_connect(plain, (host, offer.port))
            secure = await shake_hands(plain, self._client, server_side=False)
        except BaseException:
            plain.close()
            raise
        shown = secure.getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(hashlib.sha256(shown).hexdigest(), offer.certificate):
            secure.close()
            raise OSError(f"{host}:{offer.port} is not that peer")
        channel = SecureChannel(peer_id, secure, self._stall_s)
        try:
            await channel.send_bytes(bytes.fromhex(offer.token))
        except LinkLost as error:
            raise OSError(str(error)) from error
        channel.sent_bytes = 0
        return channel

    async def _accept(self, handler: Handler) -> None:
        loop = asyncio.get_running_loop()
        while True:
            plain, _ = await loop.sock_accept(self._listener)
            if self._greetings >= _GREETINGS_MAX:
                plain.close()
                continue
            self._spawn(self._greet(plain, handler))

    async def _greet(self, plain: socket.socket, handler: Handler) -> None:
        self._greetings += 1
        try:
            async with asyncio.timeout(_GREETING_S):
                channel = await self._greeted(plain)
        except (OSError, TimeoutError, LinkLost) as error:
            _log.debug("a straight stream that came to nothing: %s", error)
            plain.close()
            return
        finally:
            self._greetings -= 1
        await handler(channel)

    async def _greeted(self, plain: socket.socket) -> Channel:
        secure = await shake_hands(plain, self._server, server_side=True)
        channel = SecureChannel("", secure, self._stall_s)
        try:
            token = bytearray(_TOKEN_BYTES)
            await channel.receive_into(memoryview(token))
            if token.hex() not in self._peers:
                raise LinkLost("an unknown token")
        except BaseException:
            channel.close()
            raise
        channel.remote = self._peers[token.hex()]
        channel.received_bytes = 0
        return channel

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _server_context() -> tuple[ssl.SSLContext, str]:
    """Return the listener's side of TLS with a new certificate, and the certificate's hash."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "atomtrain")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _YEARS)
        .not_valid_after(now + _YEARS)
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    pem = serialization.Encoding.PEM
    with tempfile.TemporaryDirectory(prefix="atom-") as folder:  # ssl reads files only
        path = Path(folder, "listener.pem")
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            + certificate.public_bytes(pem)
        )
        context.load_cert_chain(path)
    der = certificate.public_bytes(serialization.Encoding.DER)
    return context, hashlib.sha256(der).hexdigest()
