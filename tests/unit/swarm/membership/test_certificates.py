"""What a certificate is, which of them count, and what no certificate is needed for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.anchors.anchors import Anchor
from atomtrain.swarm.anchors.certificate import (
    NAMED_MAX,
    complete,
    signed_text,
    signers,
    stamp_of,
    unsigned,
    with_signature,
    witnesses,
)
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.catchup import certifying
from atomtrain.swarm.catchup.donating import send_anchor
from atomtrain.swarm.membership import claims as claims_module
from atomtrain.swarm.membership.claims import CHAIN_MAX, Certified, Claims
from atomtrain.swarm.membership.standing import Standing
from atomtrain.swarm.rounds.leader_state import LeaderRound, RoundCall
from atomtrain.swarm.transport.identity import Identity, verify
from atomtrain.swarm.transport.messages import (
    AskAnchor,
    AskCertificate,
    Certificate,
    Message,
    Ready,
    encode,
)
from atomtrain.swarm.transport.transport import Channel, LinkLost
from tests.support.swarm_virtual import SimulatedPeer, Simulation
from tests.unit.swarm.membership.test_claims import forged, lie, quiet
from tests.unit.swarm.membership.test_membership import record_of

RUN = "run 1e9"
ME, A, B, C, L, M = (Identity(bytes([n]) * 32) for n in range(1, 7))
"""This peer, three whom it may know, and a liar and its accomplice."""
OWN = Stamp(4, 400, "04" * 16)
BETTER = Stamp(5, 430, "05" * 16)


def certificate(
    stamp: Stamp, members: Sequence[Identity], by: Sequence[Identity], parent: Stamp = OWN
) -> Certificate:
    """Return a certificate that names `members`, and that those in `by` have signed."""
    c = unsigned(0, stamp, parent.digest, [m.peer_id for m in members])
    text = signed_text(RUN, c)
    for one in by:
        c = with_signature(c, one.peer_id, one.sign(text).hex())
    return c


def book(*known: Identity, run: str = RUN) -> Certified:
    """Return this peer's certificates, none; it has had a round with those that it knows."""
    standing = Standing()
    for one in known:
        standing.observe(one.peer_id, 1, rejected=False)
    return Certified(run, ME.peer_id, ME.sign, verify, standing)


def shown(certified: Certified, c: Certificate, claimant: Identity = B) -> bool:
    certified.add(c)
    return certified.shows(claimant.peer_id, 0, stamp_of(c))


# Of what form


def test_a_certificate_is_small_in_a_group_of_any_size() -> None:
    many = [Identity(bytes([n]) * 32) for n in range(1, 200)]
    digests = {f"{n:032x}" for n in range(20)}
    named = {witnesses([m.peer_id for m in many], digest) for digest in digests}
    assert all(len(some) == NAMED_MAX for some in named)
    assert len(named) > 10, "not always the same ones"
    by = {m.peer_id: m for m in many}
    some = [by[peer_id] for peer_id in next(iter(named))]
    c = certificate(Stamp(2**40, 2**50, "ab" * 16), some, some[: NAMED_MAX // 2 + 1])
    assert complete(c)
    assert len(encode(c)) <= 1100


# Which count


def test_a_majority_with_somebody_known_counts() -> None:
    assert shown(book(A), certificate(BETTER, [A, B, C], [A, B]))
    assert shown(book(C), certificate(BETTER, [ME, B], [ME, B])), "this peer's own word, too"


@pytest.mark.parametrize(
    ("c", "claimant"),
    [
        (certificate(BETTER, [A, B, C], [A]), B),  # too few
        (certificate(BETTER, [A, B], [A]), A),  # half is no majority
        (certificate(BETTER, [L, M], [L, M]), L),  # nobody known
        (certificate(BETTER, [A, M], [A, M]), A),  # nobody known but who claims it
        (certificate(BETTER, [A], [A]), A),  # somebody alone
    ],
)
def test_what_does_not_count(c: Certificate, claimant: Identity) -> None:
    assert not shown(book(A), c, claimant)


def test_forged_foreign_and_replayed_signatures_are_none() -> None:
    good = certificate(BETTER, [A, B, C], [A, B])
    other = certificate(replace_stamp(BETTER, tokens=900), [A, B, C], [A, B])
    forged_ones = [
        replace(good, tokens=900),  # of another statement
        replace(good, version=6),
        replace(good, fragment=1),
        replace(good, parent="00" * 16),
        replace(good, members=(A.peer_id, B.peer_id, L.peer_id)),
        replace(good, signatures=other.signatures),
        replace(good, signatures=tuple(reversed(good.signatures))),
        replace(good, signatures=("zz",) * 3),
        replace(good, signatures=("",) * 3),
    ]
    for c in forged_ones:
        certified = book(A)
        certified.add(c)
        found = certified.of(c.fragment, c.digest)
        assert found is None or not complete(found)
    assert not shown(book(A, run="run 2e9"), good), "another run of the same name"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: replace(c, signatures=c.signatures[:1]),
        lambda c: replace(c, members=c.members + c.members),
        lambda c: replace(c, members=c.members[::-1], signatures=c.signatures[::-1]),
        lambda c: replace(c, members=(), signatures=()),
        lambda c: replace(c, members=("x",) * 100, signatures=("y",) * 100),
    ],
)
def test_what_has_another_form_is_none(spoil: Callable[[Certificate], Certificate]) -> None:
    assert not shown(book(A), spoil(certificate(BETTER, [A, B, C], [A, B])))


@pytest.mark.parametrize(
    "long",
    [
        {"digest": "0" * 4096},
        {"parent": "0" * 4096},
        {"members": (L.peer_id, "z" * 4096), "signatures": ("", "")},
    ],
)
def test_long_ones_are_not_kept(long: dict[str, Any]) -> None:
    """Of a hundred fragments and 16 anchors each they would take 30 MB."""
    c = replace(certificate(BETTER, [L], []), **long)
    c = with_signature(c, L.peer_id, L.sign(signed_text(RUN, c)).hex())
    certified = book(A)
    certified.add(c)
    assert certified.of(0, c.digest) is None


def replace_stamp(stamp: Stamp, *, tokens: int) -> Stamp:
    return Stamp(stamp.version, tokens, stamp.digest)


def test_signatures_come_one_by_one_and_each_is_checked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []

    def noted(peer_id: str, data: bytes, signature: bytes) -> bool:
        checked.append(peer_id)
        return verify(peer_id, data, signature)

    certified = book(A)
    monkeypatch.setattr(certified, "_verify", noted)
    assert not shown(certified, certificate(BETTER, [A, B, C], [A]))
    assert shown(certified, certificate(BETTER, [A, B, C], [B]))
    assert shown(certified, certificate(BETTER, [A, B, C], [A, B]))
    assert checked == [A.peer_id, B.peer_id]


def test_this_peer_signs_what_it_was_named_for() -> None:
    certified = book(A)
    certified.sign(certificate(BETTER, [ME, A], []))
    found = certified.of(0, BETTER.digest)
    assert found is not None
    assert signers(found) == {ME.peer_id}
    certified.add(certificate(BETTER, [ME, A], [A]))
    found = certified.of(0, BETTER.digest)
    assert found is not None
    assert complete(found)
    certified.sign(certificate(OWN, [A, B], []))
    blank = certified.of(0, OWN.digest)
    assert blank is not None
    assert not signers(blank)


def test_who_tells_of_an_anchor_first_cannot_have_the_true_certificate_kept_out() -> None:
    certified = book(A)
    certified.add(certificate(replace_stamp(BETTER, tokens=10**6), [L, M], [L, M]))
    assert shown(certified, certificate(BETTER, [A, B], [A, B]))
    certified.add(certificate(replace_stamp(BETTER, tokens=10**6), [L, M], [L, M]))
    assert certified.shows(B.peer_id, 0, BETTER), "nor have it forgotten"


def test_a_made_up_certificate_of_an_own_anchor_keeps_the_true_one_from_nothing() -> None:
    certified = book(A)
    certified.add(certificate(BETTER, [L, M], [L, M]))
    certified.hold(0, BETTER.digest)  # it was fetched from somebody who had no certificate yet
    assert shown(certified, certificate(BETTER, [A, B], [A, B]))
    certified.hold(0, BETTER.digest)
    certified.add(certificate(BETTER, [L, M], [L, M]))
    assert certified.shows(B.peer_id, 0, BETTER)


def test_a_flood_does_not_drive_out_this_peers_own() -> None:
    certified = book(A)
    certified.sign(certificate(BETTER, [ME, A], []))
    for number in range(100):
        certified.add(certificate(Stamp(9, number, f"{number:032x}"), [L, M], [L, M]))
    assert certified.of(0, BETTER.digest) is not None
    assert len(certified._others[0]) <= claims_module._KEPT


def test_what_is_about_something_else_is_not_kept() -> None:
    certified = book(A)
    for number in range(100):
        c = certificate(BETTER, [L, M], [L, M])
        certified.hear(0, BETTER.digest, replace(c, fragment=number + 1))
        certified.hear(0, OWN.digest, c)
        certified.hear(0, BETTER.digest, None)
    assert not certified._others
    certified.hear(0, BETTER.digest, certificate(BETTER, [A, B], [A, B]))
    assert certified.shows(B.peer_id, 0, BETTER)


# Jumps and chains


def link(number: int, members: Sequence[Identity]) -> Certificate:
    """Return the certificate of the anchor so many versions after this peer's own."""
    stamp, parent = (Stamp(4 + n, 400 + 10 * n, f"{4 + n:02x}" * 16) for n in (number, number - 1))
    return certificate(stamp, members, members, parent)


def test_a_jump_is_refused() -> None:
    for stamp in (Stamp(7, 430, "07" * 16), Stamp(5, 390, "07" * 16)):
        certified = book(A)
        certified.add(certificate(OWN, [A, B], [A, B], Stamp(3, 300, "03" * 16)))
        assert not shown(certified, certificate(stamp, [A, C], [A, C]))
    certified = book(A)  # also where the one before it becomes known later
    assert shown(certified, certificate(Stamp(7, 430, "07" * 16), [A, C], [A, C]))
    certified.add(certificate(OWN, [A, B], [A, B], Stamp(3, 300, "03" * 16)))
    assert not certified.shows(B.peer_id, 0, Stamp(7, 430, "07" * 16))


def test_a_stranger_that_tells_of_the_anchor_before_keeps_nothing_out() -> None:
    made_up = certificate(Stamp(99, 10**6, link(1, [A]).digest), [L, M], [L, M])
    good = link(2, [A, B])
    for first, then in ((made_up, good), (good, made_up)):
        certified = book(A)
        certified.add(first)
        certified.add(then)
        assert certified.shows(B.peer_id, 0, stamp_of(good))


def test_no_chain_jumps() -> None:
    far = certificate(Stamp(9, 500, "07" * 16), [C, M], [C, M], stamp_of(link(2, [B, C])))
    certified = book(A)
    for c in (link(1, [A, B]), link(2, [B, C]), far):
        certified.add(c)
    assert certified.shows(M.peer_id, 0, stamp_of(link(2, [B, C])))
    assert not certified.shows(M.peer_id, 0, stamp_of(far))


def test_trust_passes_along_a_chain_from_who_is_known_to_who_was_in_a_round_with_it() -> None:
    """So a half whose members are all new to this peer counts, as far as they came in honestly."""
    chain = [link(1, [A, B]), link(2, [B, C]), link(3, [C, M])]
    certified = book(A)
    assert not shown(certified, chain[2], M)
    for c in chain[:2]:
        certified.add(c)
    assert certified.shows(M.peer_id, 0, stamp_of(chain[2]))
    assert list(certified.chain(0, chain[2].digest)) == chain[::-1]


def test_a_chain_is_broken_where_nobody_has_signed_the_one_before() -> None:
    certified = book(A)
    for c in (link(1, [A, B]), link(2, [L, M])):
        certified.add(c)
    assert not certified.shows(L.peer_id, 0, stamp_of(link(2, [L, M])))


def test_a_chain_is_bounded() -> None:
    certified = book(A)
    certified.add(link(1, [A, B]))
    for number in range(2, CHAIN_MAX + 2):
        certified.add(link(number, [B, C]))
    counted = [certified.shows(C.peer_id, 0, stamp_of(link(n, [B, C])))
               for n in range(2, CHAIN_MAX + 2)]  # fmt: skip
    assert counted == [True] * (CHAIN_MAX - 1) + [False]
    last = link(CHAIN_MAX + 1, [B, C])
    assert len(certified.chain(0, last.digest)) == CHAIN_MAX


# Claims


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def claims_of(certified: Certified) -> tuple[Claims, Clock]:
    clock = Clock()
    return Claims(certified, clock, 30.0), clock


def test_what_is_no_better_needs_nothing_and_who_knows_nobody_takes_all() -> None:
    claims, _ = claims_of(book(A))
    assert claims.certain(L.peer_id, 0, OWN, OWN)
    assert claims.certain(L.peer_id, 0, Stamp(9, 300, "aa" * 16), OWN), "fewer tokens"
    assert claims.certain(L.peer_id, 0, BETTER, None), "a newcomer asks others"
    assert not claims.certain(L.peer_id, 0, BETTER, OWN)
    assert not claims.certain(L.peer_id, 0, Stamp(4, 400, "00" * 16), OWN), "a tie by the hash"
    claims, _ = claims_of(book())
    assert claims.certain(L.peer_id, 0, BETTER, OWN)


def test_what_nothing_certifies_is_tried_after_a_while_and_never_counts_in_a_round() -> None:
    claims, clock = claims_of(book(A))
    for now_s in (100.0, 110.0, 131.0):
        clock.now_s = now_s
        better = Stamp(5 + int(now_s), 430 + int(now_s), "05" * 16)  # another one each time
        claims.look([record_of(L, stamps=(better, None))], (OWN, None))
        assert claims.counts(L.peer_id, 0, better, OWN) == (now_s > 130)
        assert not claims.certain(L.peer_id, 0, better, OWN)
    none, better = record_of(L, stamps=(OWN, None)), Stamp(9, 999, "05" * 16)
    claims.look([none], (OWN, None))
    assert claims.counts(L.peer_id, 0, better, OWN), "also if it is better now and then only"
    clock.now_s += 31
    claims.look([none], (OWN, None))
    claims.look([record_of(L, stamps=(better, None))], (OWN, None))
    assert not claims.counts(L.peer_id, 0, better, OWN), "it begins anew"


def test_who_does_not_give_what_it_claims_is_believed_later_and_later() -> None:
    certified = book(A)
    certified.add(certificate(BETTER, [A, B], [A, B]))
    claims, clock = claims_of(certified)
    assert claims.certain(B.peer_id, 0, BETTER, OWN)
    for for_s in (5.0, 10.0, 20.0):
        claims.broke(B.peer_id)
        clock.now_s += 0.9 * for_s
        assert not claims.certain(B.peer_id, 0, BETTER, OWN)
        assert claims.certain(C.peer_id, 0, BETTER, OWN), "others claim it, too"
        clock.now_s += 0.2 * for_s
        assert claims.certain(B.peer_id, 0, BETTER, OWN)
    claims.broke(B.peer_id)
    claims.gave(B.peer_id)
    assert claims.certain(B.peer_id, 0, BETTER, OWN)


def test_fetches_that_end_together_are_one_time() -> None:
    claims, clock = claims_of(book(A))
    for _ in range(3):
        claims.broke(B.peer_id)
    clock.now_s += 5.1
    assert claims.keeps(B.peer_id)


# Rounds


def ready(stamp: Stamp) -> Ready:
    return Ready(
        version=stamp.version, tokens=stamp.tokens, digest=stamp.digest, weight=10, late=False
    )


def group_of(stamps: dict[str, Stamp], certain: set[Stamp], slack: int = 0) -> tuple[str, ...]:
    """Return the group that a leader makes of members ready on these, if it is sure of some."""
    call = RoundCall(
        round_id="7-a-1", round_index=7, fragment=0, version=4, answer_s=1.0,
        exchange_s=lambda *_: 1.0, slices_each=lambda _: 1, decision_s=1.0,
        certain=lambda _, stamp: stamp in certain, slack=slack, groups=1 + (slack > 0),
    )  # fmt: skip
    leader = LeaderRound(call, list(stamps), 0.0)
    leader.start()
    for member, stamp in stamps.items():
        leader.on_message(member, ready(stamp), 0.1)
    return leader.group


def test_a_leader_averages_without_who_claims_what_does_not_count() -> None:
    stamps = {"a": OWN, "b": OWN, "liar": BETTER}
    assert group_of(stamps, {OWN}) == ("a", "b")
    assert group_of({"a": BETTER, "b": BETTER, "late": OWN}, {OWN, BETTER}) == ("a", "b")


def test_a_leader_believes_more_than_half_of_those_that_are_ready() -> None:
    assert group_of({"a": BETTER, "b": BETTER, "me": OWN}, {OWN}) == ("a", "b")
    assert group_of({"l": BETTER, "m": BETTER, "a": OWN, "b": OWN}, {OWN}) == ("a", "b")
    assert group_of({"a": OWN, "b": OWN}, set()) == ("a", "b"), "or all, where nobody counts"


def test_nobody_raises_versions_or_tokens_of_siblings_beyond_what_counts() -> None:
    sibling, ahead = Stamp(4, 390, "aa" * 16), Stamp(5, 380, "bb" * 16)
    rich = Stamp(4, 10**6, "cc" * 16)
    stamps = {"a": OWN, "b": sibling, "ahead": ahead, "rich": rich}
    assert group_of(stamps, {OWN, sibling}, slack=2) == ("a", "b")
    assert group_of(stamps, {OWN, sibling, ahead}, slack=2) == ("a", "ahead", "b")


# Among peers


async def averaging(*names: str, **rules: object) -> Simulation:
    simulation = Simulation((60, 30), seed=5, delay_s=0.02, **rules)
    for name in names:
        await simulation.add(name, 0.5)
    return simulation


def certified_by(peer: SimulatedPeer, fragment: int = 0) -> frozenset[str]:
    context = peer.service.context
    c = context.certified.of(fragment, context.mailbox.store.anchor(fragment).stamp.digest)
    return frozenset() if c is None or not complete(c) else signers(c)


def test_whoever_holds_an_anchor_holds_its_certificate_soon() -> None:
    async def scenario() -> None:
        simulation = await averaging("a", "b", "c")
        await asyncio.sleep(20)
        for peer in simulation.peers.values():
            peer.training = False
        await asyncio.sleep(10)
        for peer in simulation.peers.values():
            assert len(certified_by(peer)) >= 2
        late = await simulation.add("late", 0.5)
        late.training = False
        await asyncio.sleep(5)
        assert len(certified_by(late)) >= 2, "it came with the anchor"

    run_virtual(scenario)


def test_a_checkpoint_keeps_certificates() -> None:
    certified = book(A)
    certified.sign(certificate(BETTER, [ME, A], []))
    certified.add(certificate(BETTER, [ME, A], [A]))
    texts = certified.texts((BETTER, None, OWN))
    assert texts[1:] == ["", ""]
    back = book(A)
    back.take_back([*texts, "nonsense", '{"kind": "AskManifest"}'])
    assert back.shows(B.peer_id, 0, BETTER)
    assert back.texts((BETTER,)) == texts[:1]


@pytest.mark.slow
def test_a_member_that_missed_a_round_follows_by_certificate_at_once() -> None:
    """Long before what nothing certifies would be tried."""

    async def scenario() -> None:
        simulation = await averaging("a", "b", "c")
        await asyncio.sleep(20)
        c = simulation.peers["c"]
        c.service._rounds.active = False
        before = c.versions()
        while simulation.peers["a"].versions()[0] < before[0] + 1:
            await asyncio.sleep(0.1)
        await asyncio.sleep(4.0)
        assert c.versions()[0] > before[0]
        fetched = [report for report in c.reports if report.outcome == "fetched"]
        assert fetched
        assert not c.service.context.claims.waited("a", 0)

    run_virtual(scenario)


def test_a_claim_without_a_certificate_is_not_fetched_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        simulation = await quiet("a", "b", "liar")
        a = simulation.peers["a"]
        a.service.context.standing.observe("b", 1, rejected=False)
        lie(simulation.peers["liar"], lambda anchor: forged(anchor, tokens=10))
        await asyncio.sleep(5)  # its record lives for six
        assert not a.reports
        await asyncio.sleep(15)
        assert [report.outcome for report in a.reports] == ["fetched"], "then it is tried"

    run_virtual(scenario)


@pytest.mark.parametrize("came_bytes", [0, 100])
@pytest.mark.parametrize("lost", [False, True])
def test_a_donor_that_was_cut_off_counts_as_before_if_some_of_its_anchor_came(
    came_bytes: int, lost: bool
) -> None:
    """By a round that does not wait, or by a link that breaks; its link may be slow."""

    async def scenario() -> None:
        simulation = await quiet("a", "slow")
        context = simulation.peers["a"].service.context
        slow = simulation.peers["slow"]
        lie(slow, lambda anchor: forged(anchor, tokens=10))

        async def send(channel: Channel, ask: AskAnchor, anchor: Anchor) -> None:
            whole = channel.send_bytes

            async def some(data: bytes | memoryview) -> None:
                head = isinstance(data, bytes)
                await whole(data if head else data[:came_bytes])
                if not head:
                    await asyncio.sleep(0 if lost else 1e6)
                    raise LinkLost("cut off")

            channel.send_bytes = some  # type: ignore[method-assign]
            await send_anchor(channel, ask, anchor)

        slow.service._donations.send = send  # type: ignore[method-assign]
        own = context.mailbox.stamp(0)
        assert own is not None
        fetcher = simulation.peers["a"].service.fetcher
        with pytest.raises(LinkLost if lost else TimeoutError):
            async with asyncio.timeout(2.0):
                await fetcher.fetch_kept("slow", 0, own, believed=True)
        assert context.claims.keeps("slow") == (came_bytes > 0)

    run_virtual(scenario)


def test_who_has_no_certificate_is_not_asked_for_it_at_each_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The streams of such questions would come to the limit, and those of rounds with them."""
    asked: list[str] = []
    send = Channel.send

    async def noted(self: Channel, message: Message) -> None:
        if isinstance(message, AskCertificate):
            asked.append(self.remote)
        await send(self, message)

    async def scenario() -> None:
        simulation = await quiet("a", "b", "ahead")
        a = simulation.peers["a"].service
        a.context.standing.observe("b", 1, rejected=False)
        a._repairer.stale = lambda: None  # type: ignore[method-assign]
        lie(simulation.peers["ahead"], lambda anchor: forged(anchor, tokens=10))
        monkeypatch.setattr(Channel, "send", noted)
        await asyncio.sleep(120)

    run_virtual(scenario)
    assert 0 < asked.count("ahead") <= certifying._CLAIM_TRIES


def test_who_is_asked_tells_of_nothing_that_it_does_not_have() -> None:
    async def scenario() -> None:
        simulation = await averaging("a", "b")
        await asyncio.sleep(10)
        certifier = simulation.peers["a"].service.fetcher.certifier
        asked: list[AskCertificate] = []
        ask = certifier._context.ask

        async def noted(channel: object, question: object, kind: object) -> object:
            assert isinstance(question, AskCertificate)
            asked.append(question)
            answer = await ask(channel, question, kind)  # type: ignore[arg-type]
            assert answer.chain == ()
            return answer

        object.__setattr__(certifier._context, "ask", noted)
        await certifier.fill(certificate(BETTER, [L, M], []))
        assert not asked, "they are no members"
        c = unsigned(0, BETTER, "", ["b", "x"])
        await certifier.fill(c)
        assert len(asked) == 1

    run_virtual(scenario)
