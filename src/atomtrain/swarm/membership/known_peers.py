"""The peers that a run has had, kept in a file: a way back when the first contact is gone."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from atomtrain.files import replacing
from atomtrain.swarm.transport.identity import public_key_of

_log = logging.getLogger("atomtrain.swarm")
PEERS_FILE = "peers.json"
_PEERS_MAX = 64
_ADDRESSES_MAX = 8
_TEXT_MAX = 512
_FILE_BYTES_MAX = 1 << 20


class KnownPeer(NamedTuple):
    """A peer that was seen once."""

    addresses: tuple[str, ...]
    seen_s: float
    """When it was last a member; Unix time."""


class KnownPeers:
    """The last 64 peers of a run, in memory and, with a path, on disk.

    Several peers of one machine may share the file: each adds what it knows. A file that is lost or
    damaged costs a way back, nothing else, so nothing here raises.
    """

    def __init__(self, run: str, path: Path | None = None) -> None:
        """Read what the file holds, if there is one."""
        self._run = run
        self._path = path
        self._peers = {} if path is None else read_known(run, path)
        self._written: dict[str, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Addresses by peer id, the peers that were seen last first."""
        return {peer_id: peer.addresses for peer_id, peer in _newest(self._peers).items()}

    def refresh(self) -> None:
        """Take in what others have written to the file."""
        if self._path is not None:
            self._peers = _newest({**self._peers, **read_known(self._run, self._path)})

    def remember(self, members: Mapping[str, tuple[str, ...]], now_s: float) -> None:
        """Note who is a member now; write the file if there is news."""
        for peer_id, addresses in members.items():
            self._peers[peer_id] = KnownPeer(tuple(addresses[:_ADDRESSES_MAX]), now_s)
        self._peers = _newest(self._peers)
        if self._path is None or not members or dict(members).items() <= self._written.items():
            return
        self._peers = _newest({**read_known(self._run, self._path), **self._peers})
        try:
            _write(self._path, self._run, self._peers)
        except OSError as error:
            _log.warning("the list of known peers %s cannot be written: %s", self._path, error)
        self._written = dict(members)  # also if not: a full disk is not asked every few seconds


def read_known(run: str, path: Path) -> dict[str, KnownPeer]:
    """Return the peers in a file; none if it is not there, damaged, or of another run."""
    try:
        with path.open("rb") as file:
            body = json.loads(file.read(_FILE_BYTES_MAX))
        if body["run"] != run:
            return {}
        found = {}
        for peer_id, (addresses, seen_s) in body["peers"].items():
            if public_key_of(peer_id) is None:
                raise ValueError("not a peer id")
            texts = tuple(text for text in addresses if isinstance(text, str))
            if not all(len(text) <= _TEXT_MAX and peer_id in text for text in texts):
                raise ValueError("not addresses of the peer")
            found[peer_id] = KnownPeer(texts[:_ADDRESSES_MAX], float(seen_s))
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        _log.info("the list of known peers %s is not used: %r", path, error)
        return {}
    return _newest(found)


def _newest(peers: Mapping[str, KnownPeer]) -> dict[str, KnownPeer]:
    order = sorted(peers, key=lambda peer_id: (-peers[peer_id].seen_s, peer_id))
    return {peer_id: peers[peer_id] for peer_id in order[:_PEERS_MAX]}


def _write(path: Path, run: str, peers: Mapping[str, KnownPeer]) -> None:
    body = {"run": run, "peers": {key: [list(p.addresses), p.seen_s] for key, p in peers.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
