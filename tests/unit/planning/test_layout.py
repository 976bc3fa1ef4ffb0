"""The table of offsets: no overlaps, aligned, segments contiguous, shared weights behind."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atomtrain.analysis import Chain, Layer
from atomtrain.engine.state.store import view_of
from atomtrain.planning.plan.layout import ALIGNMENT_BYTES, Layout

SIZES = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 200), st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
        ),
        max_size=4,
    ),
    min_size=1,
    max_size=6,
)


class Holder(nn.Module):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)


def build(
    sizes: list[list[tuple[int, torch.dtype]]], shared: list[tuple[int, int]]
) -> tuple[Chain, list[list[nn.Parameter]]]:
    """Return a chain of layers with these parameters; `shared` gives pairs a weight in common."""
    held = [[nn.Parameter(torch.empty(n, dtype=d)) for n, d in layer] for layer in sizes]
    for a, b in shared:
        weight = nn.Parameter(torch.empty(33))
        held[a % len(held)].append(weight)
        held[b % len(held)].append(weight)
    layers = tuple(
        Layer(str(i), Holder(ps), (f"v{i}",), (f"v{i + 1}",)) for i, ps in enumerate(held)
    )
    return Chain(layers, ("v0",), f"v{len(held)}", {}), held


@settings(deadline=None, max_examples=60)
@given(SIZES, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3))
def test_every_segment_finds_all_its_parameters(
    sizes: list[list[tuple[int, torch.dtype]]], shared: list[tuple[int, int]]
) -> None:
    chain, held = build(sizes, shared)
    layout = Layout(chain)
    ranges = sorted(
        (layout.offsets[id(p)], layout.offsets[id(p)] + p.numel() * p.element_size())
        for p in chain.parameters
        if p.numel()
    )
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert all(start % ALIGNMENT_BYTES == 0 for start, _ in ranges)
    assert not ranges or ranges[-1][1] <= layout.total_bytes
    assert layout.layers[0][0] == 0
    count = len(held)
    for start in range(count):
        for stop in range(start + 1, count + 1):
            pieces = layout.pieces(start, stop)
            slot = 0
            for piece in pieces:
                assert piece.slot_bytes == slot, "pieces follow each other in the slot"
                slot += piece.stop_bytes - piece.start_bytes
            assert slot == layout.segment_bytes(start, stop)
            for parameter in (p for layer in held[start:stop] for p in layer if p.numel()):
                at = layout.offsets[id(parameter)]
                end = at + parameter.numel() * parameter.element_size()
                assert sum(p.start_bytes <= at and end <= p.stop_bytes for p in pieces) == 1


def test_a_shared_weight_is_one_range_used_by_both() -> None:
    chain, held = build([[(10, torch.float32)], [(20, torch.float32)]], [(0, 1)])
    layout = Layout(chain)
    (shared,) = layout.shared
    assert shared.users == (0, 1)
    assert layout.offsets[id(held[0][-1])] == shared.start_bytes
    assert shared.start_bytes == layout.layers[-1][1]
    assert layout.segment_bytes(0, 2) == layout.total_bytes
    assert layout.segment_bytes(0, 1) == 256 + 256


def test_the_same_model_has_the_same_layout_everywhere() -> None:
    sizes = [[(7, torch.float32), (9, torch.bfloat16)], [(300, torch.float64)]]
    tables = []
    for _ in range(2):
        chain, _ = build(sizes, [(0, 1)])
        layout = Layout(chain)
        tables.append([layout.offsets[id(p)] for p in chain.parameters])
    assert tables[0] == tables[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_views_have_shape_and_type_and_share_memory(dtype: torch.dtype) -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    like = torch.empty(3, 5, dtype=dtype)
    view = view_of(buffer, 256, like)
    assert (view.shape, view.dtype) == (like.shape, dtype)
    assert view.data_ptr() == buffer.data_ptr() + 256
    empty = view_of(buffer, 1024, torch.empty(0, 4, dtype=dtype))
    assert empty.shape == (0, 4)


def test_blocks_keep_their_weights_where_others_have_the_same_users() -> None:
    from atomtrain.planning.cost.host import whole_shape
    from atomtrain.planning.plan.shape import Shape

    token, twice, head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 1)
    layers = (
        Layer("token", token, ("ids",), ("a",)),
        Layer("one", twice, ("a",), ("b",)),
        Layer("two", twice, ("b",), ("c",)),
        Layer("head", head, ("c",), ("loss",)),
    )
    chain = Chain(layers, ("ids",), "loss", {})
    rest = Chain(layers[1:], ("a",), "loss", {})
    weight = Layout(rest).block_of[id(twice.weight)]
    shape = Shape((0,), (0, 3), 1, 1, resident_blocks=(weight,), device_blocks=(2,))
    found = whole_shape(shape, chain, rest, 1)
    assert found.resident_blocks == (Layout(chain).block_of[id(twice.weight)],)
    assert found.device_blocks == (3,)
    assert (found.backward_bounds, found.host_layers) == ((1, 4), 1)
