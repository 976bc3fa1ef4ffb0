"""AdamW on the host: equal to torch's in float32, within exact bounds of it in narrow formats."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError
from atomtrain.native import library
from atomtrain.optimizers import BYTES_PER_PARAMETER, AdamW, companding, decay_groups
from atomtrain.optimizers.companding import BLOCK
from atomtrain.optimizers.moments import GPU_SLICES, SLICE
from tests.support.engine_models import gpt

NARROW = ("bfloat16", "int8")
_MOMENTS = "atomtrain.optimizers.moments"
SHAPES = [(), (1,), (3, 43), (130,), (2, 128), (0,)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def parameters(shapes: Any = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def copies(values: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(value.detach().clone()) for value in values]


def give_gradients(*sets: list[nn.Parameter], scale: float = 1.0) -> None:
    for same in zip(*sets, strict=True):
        gradient = torch.randn(same[0].shape) * scale
        for parameter in same:
            parameter.grad = gradient.clone()


def train(
    optimizer: torch.optim.Optimizer, values: list[nn.Parameter], steps: int, seed: int = 0
) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        give_gradients(values)
        optimizer.step()


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    pair = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*pair)


def assert_same(left: AdamW, right: Any, lefts: Any, rights: Any) -> None:
    for one, other in zip(lefts, rights, strict=True):
        assert same_bits(one, other)
        assert set(left.state[one]) == set(right.state[other])
        for key, value in left.state[one].items():
            assert same_bits(value, right.state[other][key]), key


def test_float32_equals_torchs_fused_adamw_bit_for_bit() -> None:
    ours, theirs = parameters(), []
    theirs = copies(ours)
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.2}
    groups = [{"params": ours[:3]}, {"params": ours[3:], "weight_decay": 0.0}]
    mine = AdamW(groups, **options)
    groups = [{"params": theirs[:3]}, {"params": theirs[3:], "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, fused=True, **options)
    for step in range(5):
        give_gradients(ours, theirs)
        ours[1].grad = theirs[1].grad = None
        for group in (*mine.param_groups, *torchs.param_groups):
            group["lr"] = 1e-3 * (step + 1)
        mine.step()
        torchs.step()
        assert_same(mine, torchs, ours, theirs)


def test_the_state_of_torchs_adamw_can_be_taken_over() -> None:
    ours, theirs = parameters(), []
    theirs = copies(ours)
    torchs = torch.optim.AdamW(theirs, fused=True)
    give_gradients(ours, theirs)
    torchs.step()
    mine = AdamW(ours)
    mine.load_state_dict(copy.deepcopy(torchs.state_dict()))
    for one, other in zip(ours, theirs, strict=True):
        one.data.copy_(other.data)
    give_gradients(ours, theirs)
    mine.step()
    torchs.step()
    assert_same(mine, torchs, ours, theirs)


def test_a_step_in_bfloat16_is_within_one_unit_of_the_exact_one() -> None:
    value = parameters([(3, 500)])
    optimizer = AdamW(value, state="bfloat16", lr=1e-2)
    train(optimizer, value, 20)
    state = optimizer.state[value[0]]
    exact = nn.Parameter(value[0].detach().clone())
    reference = torch.optim.AdamW([exact], lr=1e-2, fused=True)
    reference.state[exact] = {
        "step": state["step"].clone(),
        "exp_avg": state["exp_avg"].float(),
        "exp_avg_sq": state["exp_avg_sq"].float(),
    }
    give_gradients(value, [exact])
    optimizer.step()
    reference.step()
    assert same_bits(value[0], exact), "the parameter sees the moments before they are rounded"
    for key in ("exp_avg", "exp_avg_sq"):
        true, stored = reference.state[exact][key], state[key]
        assert stored.dtype is torch.bfloat16
        # Neighbours in bfloat16: cut off, and cut off plus one unit away from zero.
        below = (true.view(torch.int32) & -65536).view(torch.float32)
        above = ((true.view(torch.int32) & -65536) + 65536).view(torch.float32)
        assert bool(((stored.float() == below) | (stored.float() == above)).all())
        assert bool((stored.float() == below).any())
        assert bool((stored.float() == above).any())


def decoded(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both moments of an int8 state by the formulas of the documentation."""
    blocks = torch.arange(state["exp_avg"].numel()) // BLOCK
    code1, code2 = state["exp_avg"].float().flatten(), state["exp_avg_sq"].float().flatten()
    first = state["exp_avg_scale"][blocks] * (code1 / 127) * (code1 / 127).abs()
    second = state["exp_avg_sq_scale"][blocks] * ((code2 + 129) / 256) ** 2
    shape = state["exp_avg"].shape
    return first.view(shape), second.view(shape)


def largest(values: Tensor) -> Tensor:
    """Return for each element the largest magnitude of its block."""
    flat = values.abs().flatten()
    padded = torch.cat([flat, flat.new_zeros(-flat.numel() % BLOCK)]).view(-1, BLOCK)
    return padded.amax(1).repeat_interleave(BLOCK)[: flat.numel()].view(values.shape)


def test_a_step_in_int8_is_within_one_code_of_the_exact_one() -> None:
    value = parameters([(3, 500)])
    optimizer = AdamW(value, state="int8", lr=1e-2)
    train(optimizer, value, 20)
    state = optimizer.state[value[0]]
    assert state["exp_avg"].shape == (3, 500)
    assert state["exp_avg_scale"].shape == (math.ceil(1500 / BLOCK),)
    exact = nn.Parameter(value[0].detach().clone())
    reference = torch.optim.AdamW([exact], lr=1e-2, fused=True)
    first, second = decoded(state)
    reference.state[exact] = {
        "step": state["step"].clone(), "exp_avg": first, "exp_avg_sq": second,
    }  # fmt: skip
    give_gradients(value, [exact])
    optimizer.step()
    reference.step()
    torch.testing.assert_close(value[0], exact, rtol=1e-5, atol=1e-7)
    true1, true2 = (reference.state[exact][key] for key in ("exp_avg", "exp_avg_sq"))
    first, second = decoded(state)
    slack = 1 + 1e-4
    roots = [moment.sgn() * moment.abs().sqrt() for moment in (first, true1, second, true2)]
    code1, code2 = largest(true1).sqrt() / 127, largest(true2).sqrt() / 256
    assert bool(((roots[0] - roots[1]).abs() <= slack * code1).all())
    assert bool(((roots[2] - roots[3]).abs() <= slack * code2).all())
    assert bool((roots[2] >= code2 / slack).all()), "never below a 256th of the largest"


@pytest.mark.parametrize("state", NARROW)
def test_rounding_is_right_on_average(state: str) -> None:
    """With zero gradients the second moment must fall by beta2 a step, though a unit is more."""
    value = parameters([(1024,)])
    optimizer = AdamW(value, state=state, betas=(0.9, 0.999), lr=0.0)
    value[0].grad = 1 + torch.rand(1024)
    optimizer.step()
    start = moments(optimizer.state[value[0]])[1].double()
    value[0].grad = torch.zeros(1024)
    for _ in range(700):
        optimizer.step()
    first, second = moments(optimizer.state[value[0]])
    ratio = second.double().mean() / start.mean()
    assert float(ratio) == pytest.approx(0.999**700, rel=0.01)
    assert float(first.abs().max()) < 1e-20


def moments(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if "exp_avg_scale" in state:
        return decoded(state)
    return state["exp_avg"].float(), state["exp_avg_sq"].float()


@pytest.mark.parametrize("state", ["float32", *NARROW])
def test_zero_gradients_change_nothing_but_decay(state: str) -> None:
    value = parameters()
    before = copies(value)
    optimizer = AdamW(value, state=state, lr=0.1, weight_decay=0.0)
    for parameter in value:
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        optimizer.step()
    for parameter, old in zip(value, before, strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("state", NARROW)
def test_threads_and_company_change_no_bit(state: str) -> None:
    """One optimizer or several, in any order, with any number of threads: the same bits."""
    shapes = [(40, 1111), (SLICE + 700,), (130,)]
    together = parameters(shapes)
    apart = copies(together)
    threads = copies(together)
    one = AdamW(together, state=state)
    several = [AdamW([parameter], state=state) for parameter in reversed(apart)]
    threaded = AdamW(threads, state=state)
    for _ in range(3):
        give_gradients(together, apart, threads)
        torch.set_num_threads(1)
        one.step()
        for optimizer in several:
            optimizer.step()
        torch.set_num_threads(3)
        threaded.step()
    assert_same(one, threaded, together, threads)
    for optimizer, parameter, other in zip(
        several, reversed(apart), reversed(together), strict=True
    ):
        assert_same(optimizer, one, [parameter], [other])


@pytest.mark.parametrize("state", NARROW)
def test_the_seed_and_nothing_else_changes_the_rounding(state: str) -> None:
    first, again, other = parameters([(500,)]), [], []
    again, other = copies(first), copies(first)
    optimizers = [
        AdamW(first, state=state, seed=5),
        AdamW(again, state=state, seed=5),
        AdamW(other, state=state, seed=6),
    ]
    for optimizer, value in zip(optimizers, (first, again, other), strict=True):
        train(optimizer, value, 3)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("state", ["float32", *NARROW])
def test_a_saved_optimizer_goes_on_with_the_same_bits(state: str) -> None:
    value = parameters()
    optimizer = AdamW(value, state=state, seed=3)
    train(optimizer, value, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed_value = copies(value)
    resumed = AdamW(resumed_value, state=state)
    resumed.load_state_dict(saved)
    assert_same(optimizer, resumed, value, resumed_value)
    train(optimizer, value, 4, seed=1)
    train(resumed, resumed_value, 4, seed=1)
    assert_same(optimizer, resumed, value, resumed_value)


def test_groups_may_have_formats_of_their_own() -> None:
    value = parameters([(300,), (300,)])
    optimizer = AdamW([{"params": value[0]}, {"params": value[1], "state": "int8"}])
    train(optimizer, value, 1)
    assert optimizer.state[value[0]]["exp_avg"].dtype is torch.float32
    assert optimizer.state[value[1]]["exp_avg"].dtype is torch.int8


@pytest.mark.parametrize("state", BYTES_PER_PARAMETER)
def test_the_state_takes_the_bytes_that_are_told(state: str) -> None:
    value = parameters([(1024, 128)])
    optimizer = AdamW(value, state=state)
    train(optimizer, value, 1)
    kept = sum(t.nbytes for key, t in optimizer.state[value[0]].items() if key != "step")
    assert kept == BYTES_PER_PARAMETER[state] * value[0].numel()


@pytest.mark.slow
@pytest.mark.parametrize(("state", "share"), [("bfloat16", 0.01), ("int8", 0.02)])
def test_a_small_gpt_learns_as_well(state: str, share: float) -> None:
    """A tiny language: each token is followed by its own successor, or by chance."""
    successor = torch.randperm(61)

    def batch() -> dict[str, Tensor]:
        tokens = [torch.randint(61, (8,))]
        for _ in range(16):
            chance = torch.rand(8) < 0.2
            tokens.append(torch.where(chance, torch.randint(61, (8,)), successor[tokens[-1]]))
        drawn = torch.stack(tokens, 1)
        return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}

    model = gpt(width=32)
    twin = copy.deepcopy(model)
    batches = [batch() for _ in range(250)]
    losses = []
    for net, kind in ((model, state), (twin, "float32")):
        optimizer = AdamW(decay_groups(net), lr=3e-3, betas=(0.9, 0.95), state=kind)
        history = []
        for micro_batch in batches:
            optimizer.zero_grad()
            loss = net(**micro_batch).loss
            loss.backward()
            optimizer.step()
            history.append(float(loss.detach()))
        losses.append(sum(history[-20:]) / 20)
    assert losses[1] < 2.5 < history[0]
    assert losses[0] == pytest.approx(losses[1], rel=share)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": -1.0}, "lr must be at least 0 and finite, not -1.0"),
        ({"lr": math.nan}, "lr must be"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"state": "bf16"}, r"state 'bf16' is not a format of moments. Did you mean 'bfloat16'\?"),
        ({"seed": -1}, "seed must be a whole number"),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AdamW(parameters(), **change)
    with pytest.raises(ConfigError, match=words):
        AdamW([{"params": parameters(), **change}])


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, dtype=torch.float64), "float16 only: convert the model"),
        (torch.zeros(3, 2).T, "is not contiguous"),
    ],
)
def test_parameters_that_cannot_be_updated_are_refused(tensor: Tensor, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AdamW([nn.Parameter(tensor)])


def test_a_refused_group_is_not_added() -> None:
    optimizer = AdamW(parameters([(2,)]))
    with pytest.raises(ConfigError, match="float16 only"):
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2).double())})
    with pytest.raises(ConfigError, match="eps must be"):
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2)), "eps": -1})
    assert len(optimizer.param_groups) == 1


def test_a_state_of_another_format_is_refused() -> None:
    value = parameters([(300,)])
    narrow = AdamW(value, state="int8")
    train(narrow, value, 1)
    wide = AdamW(value)
    wide.state[value[0]] = narrow.state[value[0]]
    with pytest.raises(ConfigError, match=r"exp_avg as torch\.int8, state='float32' needs"):
        wide.step()


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        AdamW(table.parameters()).step()


def test_a_closure_is_called_with_gradients_enabled() -> None:
    value = parameters([(3,)])
    optimizer = AdamW(value)

    def closure() -> float:
        loss = value[0].square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == pytest.approx(float(optimizer.step(closure) or 0), rel=0.1)


@pytest.mark.parametrize("state", NARROW)
def test_scratch_grows_with_what_it_is_used_for(state: str) -> None:
    """Small parameters first, then larger ones, under a default type of the caller's own."""
    torch.set_default_dtype(torch.float64)
    try:
        for size in (5, 3000, 700):
            value = [nn.Parameter(torch.randn(size, dtype=torch.float32))]
            value[0].grad = torch.ones(size, dtype=torch.float32)
            before = value[0].detach().clone()
            AdamW(value, state=state, lr=0.5, weight_decay=0.0).step()
            torch.testing.assert_close(value[0].detach(), before - 0.5)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("master", [None, "float32", "split"])
@pytest.mark.parametrize("state", NARROW)
def test_how_much_passes_through_scratch_at_once_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, state: str, master: str | None
) -> None:
    monkeypatch.setattr(library, "core", lambda: None)
    whole, parts = [parameters([(SLICE + 700,)]) for _ in range(2)]
    options = {} if master is None else {"master": master}
    with torch.no_grad():
        parts[0].copy_(whole[0])
    if master is not None:
        whole, parts = ([nn.Parameter(p[0].detach().bfloat16())] for p in (whole, parts))
    for values, at_once in ((whole, SLICE), (parts, 1 << 17)):
        monkeypatch.setattr("atomtrain.optimizers.moments.HOST_PASS", at_once)
        optimizer = AdamW(values, state=state, **options)
        for step in range(2):
            torch.manual_seed(step)
            values[0].grad = torch.randn_like(values[0])
            optimizer.step()
        values.extend(v for v in optimizer.state[values[0]].values() if v.ndim)
    assert len(whole) > 2
    assert all(same_bits(*pair) for pair in zip(whole, parts, strict=True))


@pytest.mark.parametrize("master", [None, "float32", "split"])
@pytest.mark.parametrize("state", ["float32", *NARROW])
def test_slices_that_pass_together_as_on_a_gpu_have_the_bits_that_each_has_alone(
    monkeypatch: pytest.MonkeyPatch, state: str, master: str | None
) -> None:
    monkeypatch.setattr(library, "core", lambda: None)
    monkeypatch.setattr(f"{_MOMENTS}.SLICE", 256)
    count = 256 * (GPU_SLICES + 1) + 50  # two passes, the last slice not full
    values = torch.randn(count) if master is None else torch.randn(count).bfloat16()
    gradients = [torch.randn_like(values) for _ in range(2)]
    found = []
    for slices in (1, GPU_SLICES):
        monkeypatch.setattr(f"{_MOMENTS}.slices_at_once", lambda device, n=slices: n)
        parameter = nn.Parameter(values.clone())
        optimizer = AdamW(
            [parameter], state=state, **({} if master is None else {"master": master})
        )
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        found.append([parameter, *(v for v in optimizer.state[parameter].values() if v.ndim)])
    assert len(found[0]) > 2
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))
    there, here = (optimizer.scratch_bytes(on_gpu=on_gpu) for on_gpu in (True, False))
    assert there == here == 0 if state == "float32" and master is None else there > 3 * here


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_slices_are_rounded_by_the_bits_of_their_own_first_gradients(
    monkeypatch: pytest.MonkeyPatch, factor: float, compiled: bool
) -> None:
    seen: list[tuple[int, ...]] = []
    start = companding.start

    def note(*words: int) -> int:
        seen.append(words)
        return start(*words)

    if not compiled:
        monkeypatch.setattr(library, "core", lambda: None)
    AdamW([nn.Parameter(torch.zeros(1).bfloat16())], state="bfloat16").scratch_bytes()  # tries both
    monkeypatch.setattr(companding, "start", note)
    for name in ("SLICE", "HOST_PASS"):
        monkeypatch.setattr(f"atomtrain.optimizers.moments.{name}", 64)
    parameter = nn.Parameter(torch.randn(150).bfloat16())
    parameter.grad = torch.randn(150).bfloat16()
    optimizer = AdamW([parameter], state="bfloat16", seed=5)
    optimizer.gradient_factor = factor
    optimizer.step()
    bits = (parameter.grad.float() * factor).view(torch.int32).tolist()
    expected = [(5, 1, start, bits[start], which) for start in (0, 64, 128) for which in (1, 2)]
    assert seen == expected
