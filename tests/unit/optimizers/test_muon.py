"""Muon: orthogonal updates of hidden matrices, AdamW for the rest."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from atomtrain.errors import ConfigError
from atomtrain.optimizers import AdamW, Muon, muon_groups
from atomtrain.optimizers.muon import _bands, orthogonalizer
from tests.support.engine_models import gpt, tokens


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def orthogonal(matrix: Tensor) -> Tensor:
    scaled = matrix / (torch.linalg.vector_norm(matrix) + 1e-7)
    made = orthogonalizer(scaled)
    return made @ scaled if matrix.shape[0] <= matrix.shape[1] else scaled @ made


def as_published(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Five steps of the iteration as Jordan et al. write it."""
    x = matrix.to(dtype)
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (48, 32), (1, 5), (5, 1)])
def test_the_update_has_the_same_singular_vectors_and_values_near_one(shape: Any) -> None:
    matrix = torch.randn(shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    made = orthogonal(matrix)
    rotated = left.T @ made @ right.T
    new = rotated.diagonal()
    assert bool(((new > 0.3) & (new < 1.25)).all())
    torch.testing.assert_close(rotated, torch.diag(new), atol=1e-4, rtol=0)
    large = values > 0.2 * torch.linalg.vector_norm(values)
    assert bool((new[large] > 0.65).all())


def test_a_zero_gradient_gives_a_zero_update() -> None:
    assert torch.equal(orthogonal(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize(("rank", "most"), [(64, 1e-4), (8, 1e-3), (1, 1e-3)])
def test_steps_on_the_gram_matrix_are_those_on_the_matrix(rank: int, most: float) -> None:
    """Of any rank they are nearer to exact arithmetic than the published steps in bfloat16."""
    matrix = torch.randn(64, rank) @ torch.randn(rank, 256)
    exact = as_published(matrix, torch.float64)

    def off(made: Tensor) -> float:
        return float((made.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    assert off(orthogonal(matrix)) < most
    assert off(orthogonal(matrix)) < off(as_published(matrix, torch.bfloat16)) / 100
    assert off(orthogonal(matrix.T).T) < most


@pytest.mark.parametrize("short", [1, 511, 512, 517, 1000])
def test_products_in_bands_are_whole_and_symmetric(short: int) -> None:
    bands = _bands(short)
    assert [end for _, end in bands[:-1]] == [begin for begin, _ in bands[1:]]
    assert (bands[0][0], bands[-1][1]) == (0, short)
    assert len(bands) == (1 if short < 512 else 4)
    matrix = torch.randn(short, 40) @ torch.randn(40, short)
    made = orthogonalizer(matrix / torch.linalg.vector_norm(matrix))
    assert torch.equal(made, made.T)


@pytest.mark.parametrize("shape", [(520, 700), (700, 520), (24, 16), (16, 16)])
def test_flops_are_those_of_its_products(shape: tuple[int, int]) -> None:
    matrix = nn.Parameter(torch.randn(shape))
    matrix.grad = torch.randn(shape)
    optimizer = Muon([{"params": [matrix], "algorithm": "muon"}])
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    short, long = sorted(shape)
    last = 2 * short * short * long  # in place, which is not counted
    assert counter.get_total_flops() + last == optimizer.flops_of(matrix)
    asked = 5 * (4 * short * short * long + 2 * short**3)
    assert optimizer.flops_of(matrix) < 0.75 * asked or short < 512


def test_it_is_close_to_torchs_muon_which_rounds_to_bfloat16() -> None:
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((24, 16), (16, 24))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    mine = Muon([{"params": ours, "algorithm": "muon"}], lr=0.01, weight_decay=0.1)
    torchs = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        mine.step()
        torchs.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(
            mine.state[one]["momentum_buffer"], torchs.state[other]["momentum_buffer"]
        )
        # Each of the five updates is 0.01 * 0.2 in the root mean square; bfloat16 has 8 bits.
        assert float((one - other).detach().square().mean().sqrt()) < 5 * 0.002 * 0.05


def test_its_update_is_as_large_as_one_of_adamw() -> None:
    matrix = nn.Parameter(torch.zeros(40, 160))
    matrix.grad = torch.randn(40, 160)
    Muon([{"params": [matrix], "algorithm": "muon"}], lr=1.0, weight_decay=0.0).step()
    assert float(matrix.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_the_rest_is_updated_by_adamw_bit_for_bit() -> None:
    model = gpt()
    twin = copy.deepcopy(model)
    mine = Muon(muon_groups(model), lr=1e-3)
    rest = [p for g in mine.param_groups if g["algorithm"] == "adamw" for p in g["params"]]
    names = {n for n, p in model.named_parameters() if any(p is q for q in rest)}
    assert "embedding.token.weight" in names
    assert "embedding.position.weight" in names
    assert "blocks.0.qkv.weight" not in names
    decay = [p for n, p in twin.named_parameters() if n in names and p.ndim >= 2]
    plain = [p for n, p in twin.named_parameters() if n in names and p.ndim < 2]
    theirs = AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    for net in (model, twin):
        torch.manual_seed(0)
        net(**tokens()).loss.backward()
    mine.step()
    theirs.step()
    others = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, others[name]) == (name in names)


@pytest.mark.parametrize("state", ["float32", "int8"])
def test_a_saved_optimizer_goes_on_with_the_same_bits(state: str) -> None:
    model = gpt()
    optimizer = Muon(muon_groups(model), state=state)

    def step(net: nn.Module, its: Muon, seed: int) -> None:
        torch.manual_seed(seed)
        its.zero_grad()
        net(**tokens()).loss.backward()
        its.step()

    for seed in range(3):
        step(model, optimizer, seed)
    twin = copy.deepcopy(model)
    resumed = Muon(muon_groups(twin), state=state)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3):
        step(model, optimizer, seed)
        step(twin, resumed, seed)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, resumed.state[other][key])
            assert value.dtype is resumed.state[other][key].dtype


def test_a_small_gpt_learns() -> None:
    model = gpt(width=32)
    batch = tokens(8)
    optimizer = Muon(muon_groups(model), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < math.log(61) / 3


def test_parameters_without_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Make the groups with muon_groups\(model\)"):
        Muon(list(gpt().parameters()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Did you mean 'muon'\?"):
        Muon([{"params": [nn.Parameter(torch.zeros(2, 2))], "algorithm": "moun"}])


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \[3\] belongs in a group with 'algorithm'"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "algorithm": "muon"}])
    optimizer = Muon(muon_groups(gpt()))
    with pytest.raises(ConfigError, match="Muon updates matrices"):
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(3)), "algorithm": "muon"})
    assert len(optimizer.param_groups) == 3


@pytest.mark.parametrize("change", [{"momentum": 1.0}, {"lr": -1.0}, {"state": "int4"}])
def test_numbers_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))} "):
        Muon(muon_groups(gpt()), **change)


def test_a_state_of_another_optimizer_is_refused() -> None:
    matrix = nn.Parameter(torch.zeros(2, 2))
    matrix.grad = torch.ones(2, 2)
    optimizer = Muon([{"params": [matrix], "algorithm": "muon"}])
    optimizer.state[matrix] = {"exp_avg": torch.zeros(2, 2)}
    with pytest.raises(ConfigError, match="no float32 momentum_buffer"):
        optimizer.step()
