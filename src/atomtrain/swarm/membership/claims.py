"""Claims: which of the anchors that others say they have count for this peer, and since when.

What is no better than this peer's own anchor needs nothing. What is better counts

* with a certificate that more than half of those it names have signed, and one of them, other than
  who claims it, has contributed what counted here, or is this peer itself. Or one whose chain leads
  back to such a certificate: each was signed by somebody who has signed the one before it.
* without one, for whoever looks for something to fetch, once it has been claimed for as long as a
  record lives: signatures may be late, members die, a peer alone has nobody who signs. No round
  waits for that.
* in any case only while its peer gives what it claims. Who does not give it claims in vain for a
  while, twice as long each time.

A peer in whose rounds nobody's contribution has counted yet has nobody to go by, and takes all
claims as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.certificate import (
    Verify,
    complete,
    joined,
    same_statement,
    signed_text,
    signers,
    stamp_of,
    with_signature,
)
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.membership.records import PeerRecord
from atomtrain.swarm.membership.standing import Standing
from atomtrain.swarm.transport.messages import Certificate, decode, encode

CHAIN_MAX = 8
"""Certificates that lead from an anchor back to what a peer knows, at most."""
_KEPT = 16
"""Certificates of a fragment that are remembered: of this peer's own anchors, and of others'."""
_BROKEN_S, _BROKEN_S_MAX = 5.0, 86400.0
"""How long what a peer claims does not count that did not give it."""
_PEERS_MAX = 4096


class Certified:
    """The certificates that one peer has, all of whose signatures are good."""

    def __init__(
        self, run: str, me: str, sign: Callable[[bytes], bytes], verify: Verify, standing: Standing
    ) -> None:
        """Have none; `run` tells runs of one name apart."""
        self._run, self._me, self._sign, self._verify = run, me, sign, verify
        self._standing = standing
        self._own: dict[int, dict[str, Certificate]] = {}
        """By fragment and digest: those of this peer's anchors, the last one last."""
        self._others: dict[int, dict[str, Certificate]] = {}

    def of(self, fragment: int, digest: str) -> Certificate | None:
        """Return what there is of an anchor's certificate; from any thread."""
        own = self._own.get(fragment, {}).get(digest)
        return own or self._others.get(fragment, {}).get(digest)

    def sign(self, certificate: Certificate) -> None:
        """Sign what a round with this peer has made, if it is named, and keep it."""
        known = self.of(certificate.fragment, certificate.digest)
        c = known if known is not None and same_statement(known, certificate) else certificate
        if self._me in c.members:
            c = with_signature(c, self._me, self._sign(signed_text(self._run, c)).hex())
        self._others.get(c.fragment, {}).pop(c.digest, None)
        _keep(self._own, c)

    def add(self, told: Certificate) -> None:
        """Take the good signatures of what another peer has told, of a fragment of this run."""
        if self._jumps(told):
            return
        own = told.digest in self._own.get(told.fragment, {})
        known = self.of(told.fragment, told.digest)
        if known is not None and not same_statement(known, told):
            if own or self._counts(known, "", CHAIN_MAX):
                return
            known = None  # who has told it first may have made it up
        c = joined(known, told, self._run, self._verify)
        if signers(c):
            _keep(self._own if own else self._others, c)

    def hear(self, fragment: int, digest: str, told: Certificate | None) -> None:
        """Take what came with an anchor, or as an answer, if it is about just that."""
        if told is not None and (told.fragment, told.digest) == (fragment, digest):
            self.add(told)

    def hold(self, fragment: int, digest: str) -> None:
        """Keep the certificate of an anchor that has become this peer's own.

        Not before it counts: anybody can have made one up first, and the true one may still come.
        """
        c = self._others.get(fragment, {}).get(digest)
        if c is not None and self._counts(c, "", CHAIN_MAX):
            del self._others[fragment][digest]
            _keep(self._own, c)

    def chain(self, fragment: int, digest: str) -> tuple[Certificate, ...]:
        """Return the certificates of an anchor and of those before it, the latest first."""
        found: list[Certificate] = []
        while len(found) < CHAIN_MAX and (c := self.of(fragment, digest)) is not None:
            found.append(c)
            digest = c.parent
        return tuple(found)

    def texts(self, stamps: Iterable[Stamp | None]) -> list[str]:
        """Return the certificates of anchors for a checkpoint; empty: none. From any thread."""
        found = (None if s is None else self.of(f, s.digest) for f, s in enumerate(stamps))
        return ["" if c is None else encode(c).decode() for c in found]

    def take_back(self, texts: Iterable[str]) -> None:
        """Take back what `texts` returned; what cannot be read is left out."""
        for fragment, text in enumerate(texts):
            try:
                c = decode(text.encode())
            except BadMessage:
                continue
            if isinstance(c, Certificate):
                self.hear(fragment, c.digest, c)
                self.hold(fragment, c.digest)

    @property
    def knows_anybody(self) -> bool:
        """Somebody else's contribution has counted here."""
        return self._standing.knows_anybody(self._me)

    def shows(self, claimant: str, fragment: int, stamp: Stamp) -> bool:
        """Say whether there is a certificate by which a peer's claim counts here."""
        c = self.of(fragment, stamp.digest)
        return c is not None and stamp_of(c) == stamp and self._counts(c, claimant, CHAIN_MAX)

    def _counts(self, c: Certificate, claimant: str, links: int) -> bool:
        if not complete(c) or self._jumps(c):
            return False
        if self._known_signed(c, claimant):
            return True
        before, others = self.of(c.fragment, c.parent), signers(c) - {claimant}
        if before is None or links == 1 or others.isdisjoint(signers(before)):
            return False
        return _follows(before, c) and self._counts(before, claimant, links - 1)

    def _known_signed(self, c: Certificate, claimant: str = "") -> bool:
        """Say whether somebody signed it whom this peer knows, other than who claims it."""
        return any(p == self._me or self._standing.knows(p) for p in signers(c) - {claimant})

    def _jumps(self, c: Certificate) -> bool:
        """Say whether what is known of the anchor before shows that no round can have made it.

        Not what strangers tell of that: they could keep out whatever comes after it.
        """
        before = self.of(c.fragment, c.parent)
        if before is None or _follows(before, c):
            return False
        own = before.digest in self._own.get(c.fragment, {})
        return own or (complete(before) and self._known_signed(before))


def _follows(before: Certificate, c: Certificate) -> bool:
    return c.version == before.version + 1 and c.tokens >= before.tokens


def _keep(where: dict[int, dict[str, Certificate]], c: Certificate) -> None:
    kept = where.setdefault(c.fragment, {})
    kept.pop(c.digest, None)
    kept[c.digest] = c
    while len(kept) > _KEPT:
        del kept[next(iter(kept))]


class Claims:
    """Which claims count; plain bookkeeping, fed from records and from what comes of fetches."""

    def __init__(self, certified: Certified, clock: Callable[[], float], patience_s: float) -> None:
        """`patience_s`: how long what nothing certifies has to be claimed before it is tried."""
        self._certified, self._clock, self._patience_s = certified, clock, patience_s
        self._since: dict[tuple[str, int], tuple[float, float]] = {}
        """By peer and fragment: when it claimed a better anchor that nothing certifies, the first
        and the last time."""
        self._broken: dict[str, tuple[float, float]] = {}
        """By peer that did not give what it claimed: until when that counts, and for how long."""

    def look(self, records: Iterable[PeerRecord], own: Sequence[Stamp | None]) -> None:
        """Look at what the others claim beside this peer's own anchors, as often as it is news.

        A claim that is better now and then stands as long as one that always is.
        """
        now_s = self._clock()
        self._since = {
            which: (first_s, last_s)
            for which, (first_s, last_s) in self._since.items()
            if now_s <= last_s + self._patience_s
        }
        for record in records:
            for fragment, (stamp, mine) in enumerate(zip(record.stamps, own, strict=True)):
                if not self.certain(record.peer_id, fragment, stamp, mine):
                    which = record.peer_id, fragment
                    first_s, _ = self._since.get(which, (now_s, now_s))
                    self._since[which] = first_s, now_s

    def certain(self, peer_id: str, fragment: int, stamp: Stamp | None, own: Stamp | None) -> bool:
        """Say whether a claim counts at once, and in a round."""
        if stamp is None or own is None or not stamp.beats(own):
            return True
        shown = not self._certified.knows_anybody or self._certified.shows(peer_id, fragment, stamp)
        return shown and self.keeps(peer_id)

    def counts(self, peer_id: str, fragment: int, stamp: Stamp | None, own: Stamp | None) -> bool:
        """Say whether a claim counts for whoever looks for something to fetch."""
        return self.certain(peer_id, fragment, stamp, own) or self.waited(peer_id, fragment)

    def waited(self, peer_id: str, fragment: int) -> bool:
        """Say whether a peer has claimed better anchors for long enough to be asked for one."""
        first_s, _ = self._since.get((peer_id, fragment), (math.inf, 0.0))
        return self._clock() >= first_s + self._patience_s and self.keeps(peer_id)

    def keeps(self, peer_id: str) -> bool:
        """Say whether a peer has given what it claimed, as far as it was asked lately."""
        return self._clock() >= self._broken.get(peer_id, (0.0, 0.0))[0]

    def broke(self, peer_id: str) -> None:
        """Hear that a peer did not give the better anchor that it claims.

        Several fetches that end together are one time: a link that breaks ends all of them.
        """
        if not self.keeps(peer_id):
            return
        _, last_s = self._broken.pop(peer_id, (0.0, 0.0))
        for_s = min(max(_BROKEN_S, 2 * last_s), _BROKEN_S_MAX)
        self._broken[peer_id] = self._clock() + for_s, for_s
        while len(self._broken) > _PEERS_MAX:
            del self._broken[next(iter(self._broken))]

    def gave(self, peer_id: str) -> None:
        """Hear that it did."""
        self._broken.pop(peer_id, None)
