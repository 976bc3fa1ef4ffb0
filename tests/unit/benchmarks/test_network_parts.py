"""The parts of the network benchmark that need no processes."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
import torch

from atombench.links.shaping import Link
from atombench.network.model import ModelSetup, Speeds, merged
from atombench.network.pipeline import decode, encode, encoded_bytes
from atombench.network.prediction import Candidate, predicted_again, way_of
from atombench.network.search import candidates, to_measure
from atombench.network.setup import (
    NetworkSetup,
    StandsFor,
    device_link_bytes_per_s,
    gpu_flops_per_s,
    stand_in,
    wanted_links,
)
from atomresearch.simulation.link import PipelineLink
from atomtrain.errors import ConfigError, PlanError

SMALL = ModelSetup(layers=4, width=64, vocabulary=128, sequence_tokens=16, sequences_per_peer=8)


def speeds(setup: ModelSetup = SMALL) -> Speeds:
    """A peer that computes a sequence's layer in a millisecond, whatever the micro-batch."""
    sizes = {}
    for size in (1, 2, 4):
        layer = {"forward_s": 1e-3 * size, "backward_s": 2e-3 * size, "kept_bytes": 1e4 * size}
        sizes[size] = {
            **dict.fromkeys(("embedding", "block", "head"), layer),
            "wire_s": {"bfloat16": 1e-5, "int8": 2e-5},
        }
    return Speeds(sizes, 1e9)


def link_of(bits_per_s: float) -> PipelineLink:
    return way_of(Link(bits_per_s=bits_per_s))


@pytest.mark.parametrize(
    ("wire", "error"), [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 1 / 127)]
)
def test_what_travels_comes_back(wire: str, error: float) -> None:
    values = torch.randn(3, 5, 64)
    data = encode(values, wire)
    assert data.dtype == torch.uint8
    assert data.numel() == encoded_bytes(wire, 15, 64)
    back = decode(data, wire, values.shape)
    largest = values.abs().amax(dim=-1, keepdim=True)
    assert ((back - values).abs() <= error * largest).all()


def test_zeros_travel_in_eight_bits() -> None:
    zeros = torch.zeros(2, 64)
    assert torch.equal(decode(encode(zeros, "int8"), "int8", zeros.shape), zeros)


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ConfigError, match="no wire format"):
        encode(torch.zeros(2, 64), "int2")


def test_all_peers_see_the_same_tokens() -> None:
    ours, theirs = (
        torch.cat([batch["input_ids"] for batch in SMALL.micro_batches(3, 8, size)])
        for size in (2, 4)
    )
    assert torch.equal(ours, theirs)
    other = SMALL.micro_batches(4, 8, 8)[0]["input_ids"]
    assert not torch.equal(ours, other)


def test_the_flops_are_those_of_a_hand_count() -> None:
    # A block of width D: 4 D*D for attention, 8 D*D for the MLP; scores and mixing 2 T*D each.
    block = 2 * 3 * (12 * 64 * 64) + 2 * 3 * (2 * 16 * 64)
    assert SMALL.flops_per_token == 4 * block + 2 * 3 * 128 * 64


def test_a_stand_in_has_the_bits_per_flop_of_the_gpu() -> None:
    wanted = StandsFor("rtx-3090", 1e8)
    link = stand_in(SMALL, wanted, peer_flops_per_s=1e10)
    assert link.bits_per_s is not None
    assert link.bits_per_s / 1e10 == pytest.approx(1e8 / gpu_flops_per_s("rtx-3090"))


def test_a_stand_in_for_a_model_has_its_time_for_activations() -> None:
    wanted = StandsFor("rtx-3090", 1e8, "gpt3-xl")
    link = stand_in(SMALL, wanted, peer_flops_per_s=1e10)
    assert link.bits_per_s is not None
    here = 16 * SMALL.width / link.bits_per_s / (SMALL.flops_per_token / 1e10)
    large = ModelSetup(layers=24, width=2048, vocabulary=50257, sequence_tokens=2048)
    there = 16 * 2048 / 1e8 / (large.flops_per_token / gpu_flops_per_s("rtx-3090"))
    assert here == pytest.approx(there)


def test_the_device_link_has_the_bytes_per_flop_of_the_gpu() -> None:
    setup = NetworkSetup()
    slow, fast = (device_link_bytes_per_s(setup, rate) for rate in (1e10, 1e11))
    assert fast == pytest.approx(10 * slow)
    assert 1e6 < slow < 1e8


def test_every_link_is_a_case() -> None:
    setup = NetworkSetup()
    found = wanted_links(setup, 3e10)
    assert len(found) == len(setup.links) + len(setup.stand_ins)
    assert found[0].link.bits_per_s is None


@pytest.mark.parametrize("fields", [{"peers": 1}, {"spare_share": 0.0}, {"micro_batches": (4, 7)}])
def test_inputs_that_cannot_be_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        NetworkSetup(**fields)  # type: ignore[arg-type]


def test_the_best_prediction_comes_first_and_fits() -> None:
    found = candidates(SMALL, 2, 16, speeds(), link_of(1e9), 10_000_000)
    times_s = [candidate.predicted_s for candidate in found]
    assert times_s == sorted(times_s)
    assert all(candidate.predicted_bytes <= 10_000_000 for candidate in found)
    for candidate in found:
        assert candidate.micro_batch * candidate.micro_batches == 16
        assert sum(len(order) for order in candidate.orders) == (
            2 * candidate.micro_batches * 2 * candidate.chunks
        )


def test_several_short_pipelines_share_the_samples_and_average_gradients() -> None:
    def best(link: Link) -> dict[int, Candidate]:
        found = candidates(SMALL, 4, 16, speeds(), way_of(link), 20_000_000)
        assert {candidate.pipelines for candidate in found} == {1, 2}
        for candidate in found:
            assert candidate.micro_batch * candidate.micro_batches * candidate.pipelines == 16
            assert len(candidate.orders) * candidate.pipelines == 4
        return {c.pipelines: c for c in reversed(found)}

    fast, slow = best(Link(bits_per_s=1e10)), best(Link(bits_per_s=1e5))
    assert fast[2].predicted_s < fast[1].predicted_s  # a shorter bubble
    # A gradient of half of the model, of two bytes a parameter, crosses each link in each step.
    assert slow[2].predicted_s > 8 * SMALL.parameters / 1e5
    assert "2 such pipelines" in slow[2].name()
    json.dumps(slow[2].plan())


def test_a_lossy_link_is_predicted_slower() -> None:
    clean, lossy = (
        candidates(SMALL, 2, 16, speeds(), way_of(link), 10_000_000)[0].predicted_s
        for link in (
            Link(bits_per_s=1e7, round_trip_s=0.1),
            Link(bits_per_s=1e7, round_trip_s=0.1, loss_share=0.01),
        )
    )
    assert lossy > clean


def test_peers_that_share_cores_are_predicted_slower_and_bbr_ignores_losses() -> None:
    def best_s(link: Link, cores: float = math.inf, control: str = "cubic") -> float:
        found = candidates(SMALL, 4, 16, speeds(), way_of(link, control), 20_000_000, cores)
        return found[0].predicted_s

    fast = Link(bits_per_s=1e9)
    # All of the work of four peers on two cores.
    assert best_s(fast, cores=2) >= 16 * 6 * 3e-3 / 2
    assert best_s(fast, cores=2) > 1.5 * best_s(fast, cores=4)
    assert best_s(fast, cores=4) == best_s(fast)
    lossy = Link(bits_per_s=1e7, round_trip_s=0.1, loss_share=0.01)
    assert best_s(lossy, control="bbr") < best_s(lossy)


def test_a_prediction_is_made_again_of_a_name() -> None:
    way = link_of(1e6)
    found = candidates(SMALL, 4, 16, speeds(), way, 20_000_000)
    assert {c.pipelines for c in found} == {1, 2}
    for candidate in found[::5]:
        again_s = predicted_again(candidate.name(), SMALL, 4, speeds(), way)
        assert again_s == candidate.predicted_s
    library = replace(
        next(c for c in found if not c.recompute and c.chunks == 1 and c.pipelines == 1),
        schedule="1F1B",
    )
    again_s = predicted_again(library.name(), SMALL, 4, speeds(), way)
    assert again_s == library.library_s
    with pytest.raises(ConfigError, match="not the name of a pipeline"):
        predicted_again("own", SMALL, 4, speeds(), way)


def test_what_was_measured_of_the_link_counts_if_it_is_less() -> None:
    link = Link(bits_per_s=1e6)
    assert way_of(link, probe={"both_ways_bits_per_s": 7e5}).bits_per_s == 7e5
    for probe in (None, {"bits_per_s": 7e5}, {"both_ways_bits_per_s": 2e6}):
        assert way_of(link, probe=probe) == way_of(link)
    # An unshaped link has no rate to fall short of; a lossy one is probed for too short a time.
    for other in (Link(bits_per_s=None), replace(link, loss_share=0.01)):
        assert way_of(other, probe={"both_ways_bits_per_s": 7e5}) == way_of(other)


def test_what_ranks_were_measured_to_compute_counts() -> None:
    way = link_of(1e9)
    found = candidates(SMALL, 2, 16, speeds(), way, 10_000_000)
    best = next(c for c in found if c.pipelines == 1 and c.chunks == 1 and not c.recompute)

    def again_s(*compute_s: float, name: str = best.name()) -> float:
        return predicted_again(name, SMALL, 2, speeds(), way, compute_s=compute_s)

    # Three layers of 3 ms a sequence on each rank.
    alone_s = 16 * 3 * 3e-3
    assert again_s(alone_s, alone_s) == pytest.approx(best.predicted_s, rel=0.01)
    assert again_s(2 * alone_s, 2 * alone_s) == pytest.approx(2 * best.predicted_s, rel=0.02)
    # The slower rank sets the pace.
    assert again_s(alone_s, 2 * alone_s) > 2 * alone_s
    library = replace(best, schedule="1F1B").name()
    assert again_s(2 * alone_s, 2 * alone_s, name=library) > 1.9 * again_s(name=library)


def test_the_library_s_interleaved_schedule_has_a_prediction_of_its_own() -> None:
    found = candidates(SMALL, 2, 16, speeds(), link_of(1e5), 10_000_000)
    alike = [c for c in found if c.chunks == 2 and not c.recompute and c.micro_batches % 2 == 0]
    assert all(c.library_s > 0 for c in alike)
    assert any(c.library_s > 1.05 * c.predicted_s for c in alike)


def test_a_slow_link_calls_for_eight_bits() -> None:
    slow = candidates(SMALL, 2, 16, speeds(), link_of(1e5), 10_000_000)
    assert slow[0].wire == "int8"
    # 16 sequences of 16 tokens of 64 values and a scale cross once each way.
    least_s = 16 * 16 * (64 + 4) * 8 / 1e5
    assert least_s < slow[0].predicted_s < 2 * least_s


def test_a_long_way_calls_for_more_in_flight() -> None:
    far = Link(bits_per_s=1e9, round_trip_s=0.05)
    found = candidates(SMALL, 2, 16, speeds(), way_of(far), 10_000_000)
    alike = {
        candidate.in_flight: candidate.predicted_s
        for candidate in found
        if (candidate.chunks, candidate.micro_batch, candidate.wire, candidate.recompute)
        == (1, 1, "bfloat16", False)
    }
    assert alike[8] < alike[2]
    assert found[0].in_flight > 2


def test_memory_keeps_out_what_does_not_fit() -> None:
    everything = candidates(SMALL, 2, 16, speeds(), link_of(1e9), 10_000_000)
    least = min(candidate.predicted_bytes for candidate in everything)
    some = candidates(SMALL, 2, 16, speeds(), link_of(1e9), least)
    assert 0 < len(some) < len(everything)
    with pytest.raises(PlanError, match="no pipeline of 2 peers fits"):
        candidates(SMALL, 2, 16, speeds(), link_of(1e9), least - 1)


def test_recomputing_costs_time_and_saves_memory() -> None:
    found = candidates(SMALL, 2, 16, speeds(), link_of(1e9), 10_000_000)
    kept, again = (
        next(c for c in found if (c.chunks, c.in_flight, c.recompute) == (1, 16, recompute))
        for recompute in (False, True)
    )
    assert again.predicted_s > kept.predicted_s
    assert again.predicted_bytes < kept.predicted_bytes


def test_what_is_measured_has_both_wires_and_the_library() -> None:
    found = candidates(SMALL, 2, 16, speeds(), link_of(1e9), 10_000_000)
    chosen = to_measure(found, SMALL, 2)
    assert {candidate.wire for candidate in chosen} == {"bfloat16", "int8"}
    assert {candidate.schedule for candidate in chosen[-2:]} == {"1F1B", "Interleaved1F1B"}
    json.dumps([candidate.plan() for candidate in chosen])


def test_the_best_pipeline_is_also_tried_with_more_in_flight() -> None:
    found = candidates(SMALL, 2, 16, speeds(), link_of(1e9), 10_000_000)
    best = found[0]
    more = [c for c in to_measure(found, SMALL, 2) if c.in_flight > best.in_flight]
    alike = replace(best, in_flight=0)
    assert any(
        replace(c, in_flight=0, orders=best.orders, predicted_s=best.predicted_s,
                predicted_bytes=best.predicted_bytes, library_s=best.library_s) == alike
        and c.in_flight <= 4 * best.in_flight
        for c in more
    )  # fmt: skip


def test_the_slowest_peer_counts() -> None:
    one, other = (
        {
            "sizes": {"1": {"block": {"forward_s": a}, "wire_s": {"int8": b}}},
            "update_parameters_per_s": rate,
        }
        for a, b, rate in ((1.0, 4.0, 10.0), (2.0, 3.0, 5.0))
    )
    both = Speeds.of([one, other])
    assert both.sizes[1] == {"block": {"forward_s": 2.0}, "wire_s": {"int8": 4.0}}
    assert both.update_parameters_per_s == 5.0
    turns = [{"block": {"forward_s": a}} for a in (3.0, 2.0)]
    assert merged(turns, min) == {"block": {"forward_s": 2.0}}


def test_speed_is_that_of_the_best_micro_batch() -> None:
    # Six layers of 3 ms a sequence of 16 tokens.
    assert speeds().tokens_per_s(SMALL) == pytest.approx(16 / (6 * 3e-3))
    assert math.isfinite(SMALL.boundary_bits_per_flop)


def test_a_peer_answers_what_it_is_told_and_names_what_fails() -> None:
    from atombench.worker import Reply, answer

    class Echo:
        def commands(self) -> dict[str, object]:
            return {"echo": self.echo}

        def echo(self, value: int) -> Reply:
            if value < 0:
                raise ValueError("negative\nvalue")
            return {"value": value}

    replies = io.StringIO()
    for value in (1, -1):
        answer(Echo(), json.dumps({"do": "echo", "value": value}), replies)  # type: ignore[arg-type]
    first, second = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert first == {"ok": {"value": 1}}
    assert second == {"error": "echo: ValueError: negative value"}
