"""Chains: what crosses a cut follows from who writes and who reads; nonsense is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from atomtrain.analysis import Chain, Layer
from atomtrain.errors import AnalysisError


def chain(*layers: Layer, inputs: tuple[str, ...] = ("x", "side")) -> Chain:
    return Chain(layers, inputs, "loss", {})


def layer(name: str, reads: str, writes: str, module: nn.Module | None = None) -> Layer:
    return Layer(name, module or nn.Identity(), tuple(reads.split()), tuple(writes.split()))


SKIPS = chain(
    layer("a", "x", "ha"),
    layer("b", "ha", "hb unused"),
    layer("c", "hb ha side", "hc"),
    layer("d", "hc ha", "loss"),
)


def test_values_that_cross_each_cut() -> None:
    assert SKIPS.crossing(0) == ()
    assert SKIPS.crossing(1) == ("ha",)
    assert SKIPS.crossing(2) == ("ha", "hb")
    assert SKIPS.crossing(3) == ("ha", "hc")
    assert SKIPS.crossing(4) == ()


def test_reads_and_writes_of_ranges() -> None:
    assert SKIPS.reads(0, 4) == ("x", "side")
    assert SKIPS.reads(1, 3) == ("ha", "side")
    assert SKIPS.reads(3, 4) == ("hc", "ha")
    assert SKIPS.writes(0, 2) == ("ha", "hb"), "what nobody reads is not kept"
    assert SKIPS.writes(2, 4) == ("loss",)
    assert SKIPS.writes(0, 4) == ("loss",)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "no layers"),
        ([("a", "y", "loss")], "'a' reads 'y' before it exists"),
        ([("a", "hb", "ha"), ("b", "ha", "hb loss")], "'a' reads 'hb' before"),
        ([("a", "x", "h"), ("b", "h", "h loss")], "'b' writes 'h' a second time"),
        ([("a", "x", "side loss")], "'a' writes 'side' a second time"),
        ([("a", "x", "loss"), ("b", "loss", "h")], "last layer must write 'loss'"),
    ],
)
def test_chains_that_cannot_be_are_refused(
    layers: list[tuple[str, str, str]], message: str
) -> None:
    with pytest.raises(AnalysisError, match=message):
        chain(*(layer(*arguments) for arguments in layers))


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1


def test_a_layer_that_returns_more_or_fewer_values_is_named() -> None:
    x = torch.ones(2)
    assert len(layer("ok", "x", "a b", Two()).run({}, [x])) == 2
    with pytest.raises(AnalysisError, match="'few' returned 2 values, 3 were expected: a, b, c"):
        layer("few", "x", "a b c", Two()).run({}, [x])
    with pytest.raises(AnalysisError, match="'many' returned 2 values, 1 were expected: a"):
        layer("many", "x", "a", Two()).run({}, [x])


def test_a_layer_runs_with_the_tensors_it_is_given() -> None:
    linear = nn.Linear(2, 2, bias=False)
    before = linear.weight.detach().clone()
    other = {"weight": torch.eye(2) * 3}
    (out,) = layer("linear", "x", "y", linear).run(other, [torch.ones(1, 2)])
    assert torch.equal(out, torch.full((1, 2), 3.0))
    assert torch.equal(linear.weight, before)


def test_shared_weights_are_one_parameter_with_two_users() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    tied = chain(layer("a", "x", "h", first), layer("b", "h", "loss", second))
    assert len(tied.parameters) == 3
    assert tied.users[id(first.weight)] == (0, 1)
    assert tied.users[id(first.bias)] == (0,)
    assert tied.parameters[0] is first.weight


def test_a_weight_with_two_names_in_one_layer_has_one_user() -> None:
    both = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    both[1].weight = both[0].weight
    tied = chain(layer("a", "x", "loss", both))
    assert tied.users[id(both[0].weight)] == (0,)
    assert {"0.weight", "1.weight"} <= set(tied.layers[0].parameters)
    assert len(tied.parameters) == 3


class Scale(nn.Module):
    """Has a weight under two names, a buffer, and a way to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.again = self.inner
        self.alias = self.inner.weight
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("no number")
        return self.again(x) + self.inner(x) + x @ self.alias + self.offset


def test_a_layer_runs_with_tensors_in_place_of_its_own() -> None:
    module = Scale()
    held = layer("a", "x", "loss", module)
    own = dict(module.named_parameters(remove_duplicate=False))
    weight, offset, x = torch.randn(2, 2, requires_grad=True), torch.randn(2), torch.randn(3, 2)
    tensors = {**dict.fromkeys(held.parameters, weight), "offset": offset}
    # On a copy: of a module with two names it would leave the given weight behind.
    expected = torch.func.functional_call(copy.deepcopy(module), dict(tensors), (x,))
    assert torch.equal(held.call(tensors, [x]), expected)
    held.call(tensors, [x]).sum().backward()
    assert weight.grad is not None
    with pytest.raises(ValueError, match="no number"):
        held.call(tensors, [torch.full((1, 2), torch.nan)])
    after = dict(module.named_parameters(remove_duplicate=False))
    assert after.keys() == own.keys() == {"alias", "inner.weight", "again.weight"}
    assert all(after[name] is own[name] for name in own)
    assert module.offset is held.buffers["offset"]
