"""Certificates of anchors: what the members of a round sign of what it has made.

A certificate names the anchor, the one that it was made of, and those who were there to the end, or
five of them in a large group, and carries the signatures that have come. It shows what its signers
say: that they took part, and took the outcome. It does not show that the anchor is good, since
identities cost nothing and can sign among themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable

from msgspec.structs import replace

from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.transport.messages import Certificate, encode

NAMED_MAX = 5
"""Members that a certificate names: it has about 1 KiB with the signatures of more than half."""
_TEXT_MAX = 128
"""Characters of a hash or an id, at most: what others make up is kept for a while."""
Verify = Callable[[str, bytes, bytes], bool]


def witnesses(survivors: Iterable[str], digest: str) -> tuple[str, ...]:
    """Return whom the certificate of an anchor names: all that were there to the end, or five.

    Which five follows from a hash of the anchor's own and their ids, so that others sign each
    time.
    """

    def score(peer_id: str) -> bytes:
        return hashlib.blake2b(f"{digest}/{peer_id}".encode(), digest_size=8).digest()

    return tuple(sorted(sorted(set(survivors), key=score)[:NAMED_MAX]))


def unsigned(fragment: int, stamp: Stamp, parent: str, survivors: Collection[str]) -> Certificate:
    """Return a certificate that nobody has signed yet; `parent`: digest of the anchor before."""
    members = witnesses(survivors, stamp.digest)
    return Certificate(
        fragment=fragment,
        version=stamp.version,
        tokens=stamp.tokens,
        digest=stamp.digest,
        parent=parent,
        members=members,
        signatures=("",) * len(members),
    )


def stamp_of(certificate: Certificate) -> Stamp:
    """Return the stamp of the anchor that a certificate is about."""
    return Stamp(certificate.version, certificate.tokens, certificate.digest)


def signed_text(run: str, certificate: Certificate) -> bytes:
    """Return what each member signs; `run` tells runs of one name apart."""
    told = encode(replace(certificate, signatures=()))
    return f"atom anchor\n{run}\n".encode() + told


def signers(certificate: Certificate) -> frozenset[str]:
    """Return the members whose signatures a certificate has."""
    pairs = zip(certificate.members, certificate.signatures, strict=True)
    return frozenset(member for member, signature in pairs if signature)


def complete(certificate: Certificate) -> bool:
    """Say whether more than half of the members that it names have signed."""
    return 2 * len(signers(certificate)) > len(certificate.members)


def with_signature(certificate: Certificate, member: str, signature: str) -> Certificate:
    """Return it with one member's signature, in hexadecimal digits, in its place."""
    pairs = zip(certificate.members, certificate.signatures, strict=True)
    return replace(certificate, signatures=tuple(signature if m == member else s for m, s in pairs))


def same_statement(one: Certificate, other: Certificate) -> bool:
    """Say whether two certificates differ in their signatures only."""
    return replace(one, signatures=()) == replace(other, signatures=())


def joined(known: Certificate | None, told: Certificate, run: str, verify: Verify) -> Certificate:
    """Return what is known with the signatures that are told and good; each is checked once.

    `known` is a certificate of the same statement, all of whose signatures are good, or None. What
    is told of another form than this protocol has comes back without any signature.
    """
    found = known or replace(told, signatures=("",) * len(told.members))
    text = signed_text(run, told)
    if not _well_formed(told):
        return found
    have = signers(found)
    for member, signature in zip(told.members, told.signatures, strict=True):
        if signature and member not in have and verify(member, text, _bytes_of(signature)):
            found = with_signature(found, member, signature)
    return found


def _well_formed(c: Certificate) -> bool:
    named = 0 < len(c.members) <= NAMED_MAX and list(c.members) == sorted(set(c.members))
    short = all(len(text) <= _TEXT_MAX for text in (c.digest, c.parent, *c.members))
    return named and short and len(c.signatures) == len(c.members)


def _bytes_of(signature: str) -> bytes:
    try:
        return bytes.fromhex(signature)
    except ValueError:
        return b""
