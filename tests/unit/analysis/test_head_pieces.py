"""The head a piece at a time: the right loss and gradients, and what it saves, counted exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from atomtrain.analysis import Chain, Layer, LayerCost, layer_costs
from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.analysis.head.pieces import linear_cross_entropy
from atomtrain.errors import ConfigError
from atomtrain.models.gpt import GPTConfig, Head

ROWS, WIDTH, VOCABULARY = 12, 10, 37


def inputs(
    dtype: torch.dtype = torch.float64, bias: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return hidden, weight, bias and labels; every fifth row does not count."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[::5] = -100
    return draw(ROWS, WIDTH), draw(VOCABULARY, WIDTH), draw(VOCABULARY) if bias else None, labels


def unsplit(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **options: Any
) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), labels, **options)


def gradients(loss: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]))


@pytest.mark.parametrize("pieces", [1, 2, 3, 5, 36, 37, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients_are_those_of_the_unsplit_head(
    pieces: int, bias: bool, reduction: Any, label_smoothing: float
) -> None:
    *leaves, labels = inputs(bias=bias)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    expected = unsplit(*leaves, labels, **options)
    loss = linear_cross_entropy(*leaves, labels, pieces=pieces, **options)
    assert loss.shape == expected.shape
    torch.testing.assert_close(loss, expected)
    for actual, wanted in zip(
        gradients((3 * loss).square().sum(), *leaves),
        gradients((3 * expected).square().sum(), *leaves),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("pieces", [1, 4])
def test_gradients_agree_with_finite_differences(pieces: int) -> None:
    *leaves, labels = inputs()
    assert torch.autograd.gradcheck(
        lambda *values: linear_cross_entropy(*values, labels, pieces=pieces, label_smoothing=0.1),
        leaves,
    )


@given(
    rows=st.integers(1, 6), width=st.integers(1, 5), vocabulary=st.integers(1, 20),
    pieces=st.integers(1, 25), scale=st.sampled_from([1e-3, 1.0, 300.0]), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_sizes_and_very_unlike_logits(
    rows: int, width: int, vocabulary: int, pieces: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(rows, width, generator=generator) * scale).double().requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).double().requires_grad_()
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    loss = linear_cross_entropy(hidden, weight, None, labels, pieces=pieces)
    expected = unsplit(hidden, weight, None, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, hidden, weight), gradients(expected, hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_added_up_in_float32(dtype: torch.dtype) -> None:
    *leaves, labels = inputs(dtype)
    # What the unsplit head computes if its logits are made float32, as language models do.
    expected = F.cross_entropy(F.linear(*leaves).float(), labels)
    loss = linear_cross_entropy(*leaves, labels, pieces=4)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    eps = torch.finfo(dtype).eps
    for actual, wanted in zip(gradients(loss, *leaves), gradients(expected, *leaves), strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, wanted, rtol=4 * eps, atol=eps)


def test_logits_of_minus_infinity_have_no_part() -> None:
    """A vocabulary padded to a round size masks its tail so; here a whole piece is masked."""
    hidden, weight, bias, labels = inputs()
    masked = bias.detach().clone()
    masked[20:30] = -math.inf
    labels[(labels >= 20) & (labels < 30)] = 3
    for mask in (masked, masked.roll(10)):
        labels[mask[labels.clamp(0)].isinf()] = 15
        loss = linear_cross_entropy(hidden, weight, mask, labels, pieces=4)
        expected = unsplit(hidden, weight, mask, labels)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            gradients(loss, hidden, weight), gradients(expected, hidden, weight)
        )


def test_rows_that_do_not_count() -> None:
    *leaves, labels = inputs()
    labels[::5] = 5
    loss = linear_cross_entropy(*leaves, labels, pieces=3, ignore_index=5)
    expected = unsplit(*leaves, labels, ignore_index=5)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, *leaves), gradients(expected, *leaves))
    nothing = torch.full_like(labels, -100)
    loss = linear_cross_entropy(*leaves, nothing, pieces=3)
    assert loss.isnan(), "as torch's mean over no rows"
    assert all(not gradient.any() for gradient in gradients(loss, *leaves))


@pytest.mark.parametrize("label", [VOCABULARY, -1, 10**6])
def test_a_label_outside_of_the_vocabulary_is_an_error(label: int) -> None:
    *leaves, labels = inputs()
    labels[3] = label
    with pytest.raises(RuntimeError, match=f"{label} is out of bounds"):
        linear_cross_entropy(*leaves, labels, pieces=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pieces": 0}, "pieces must be at least 1, not 0"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, not 1.5"),
        ({"reduction": "max"}, "reduction must be 'mean', 'sum' or 'none', not 'max'"),
    ],
)
def test_impossible_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        linear_cross_entropy(*inputs(), **{"pieces": 2, **wrong})


def test_shapes_that_do_not_fit_are_named() -> None:
    hidden, weight, bias, labels = inputs()
    with pytest.raises(ConfigError, match=r"hidden \[12, 9\].*\[37, 10\].*flatten batch"):
        linear_cross_entropy(hidden[:, 1:], weight, bias, labels, pieces=2)
    with pytest.raises(ConfigError, match=r"labels \[11\]"):
        linear_cross_entropy(hidden, weight, bias, labels[1:], pieces=2)


def test_only_the_gradients_that_are_wanted_are_computed() -> None:
    hidden, weight, bias, labels = inputs()
    frozen = linear_cross_entropy(hidden, weight.detach(), None, labels, pieces=3)
    with FlopCounterMode(display=False) as flops:
        gradients(frozen, hidden)
    assert flops.get_total_flops() == 2 * 2 * ROWS * WIDTH * VOCABULARY
    trained = linear_cross_entropy(hidden.detach(), weight, None, labels, pieces=3)
    torch.testing.assert_close(
        gradients(trained, weight), gradients(unsplit(hidden, weight, None, labels), weight)
    )
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, bias, labels, pieces=3).requires_grad


def test_autocast_computes_in_its_own_type() -> None:
    *leaves, labels = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*leaves, labels, pieces=4)
        expected = unsplit(*leaves, labels)
    torch.testing.assert_close(loss, expected.float(), rtol=1e-2, atol=1e-2)
    for actual, wanted in zip(gradients(loss, *leaves), gradients(expected, *leaves), strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [1, 4, 16])
def test_memory_is_one_piece_of_the_logits_and_the_gradients(
    dtype: torch.dtype, pieces: int
) -> None:
    rows, width, vocabulary = 256, 64, 16 * 1024
    with FakeTensorMode():
        hidden = torch.empty(rows, width, dtype=dtype, requires_grad=True)
        weight = torch.empty(vocabulary, width, dtype=dtype, requires_grad=True)
        labels = torch.empty(rows, dtype=torch.long)
        tracker = StorageTracker()
        with tracker, FlopCounterMode(display=False) as flops:
            loss = linear_cross_entropy(hidden, weight, None, labels, pieces=pieces)
            forward_bytes, kept_bytes = tracker.peak_bytes, tracker.live_bytes
            product = 2 * rows * width * vocabulary
            assert flops.get_total_flops() == product
            tracker.reset_peak()
            loss.backward()
        # Backward computes the logits once more, then the two gradients.
        assert flops.get_total_flops() == product + 3 * product
    piece = rows * vocabulary // pieces
    logits_bytes = 4 * piece + (0 if dtype == torch.float32 else dtype.itemsize * piece)
    few_bytes = 100 * rows  # what each row keeps: its sum, its label's place, ...
    assert forward_bytes <= logits_bytes + few_bytes
    assert kept_bytes <= few_bytes
    gradient_bytes = dtype.itemsize * weight.numel() + 4 * hidden.numel()
    product_bytes = 0 if dtype == torch.float32 else dtype.itemsize * hidden.numel()
    assert tracker.peak_bytes <= logits_bytes + gradient_bytes + product_bytes + few_bytes


def test_meta_tensors_and_stand_in_parameters() -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, WIDTH, dtype=torch.float64))

        def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, self.weight, None, labels, pieces=3)

    hidden, weight, _, labels = inputs()
    loss = torch.func.functional_call(Head(), {"weight": weight}, (hidden, labels))
    torch.testing.assert_close(loss, unsplit(hidden, weight, None, labels))
    on_meta = linear_cross_entropy(
        hidden.to("meta"), weight.to("meta"), None, labels.to("meta"), pieces=3
    )
    assert on_meta.shape == ()


def head_cost(width: int, vocabulary: int, rows: int, pieces: int) -> LayerCost:
    """Return the costs of a GPT's head in float32; nothing is allocated."""
    with torch.device("meta"):
        config = GPTConfig(
            layers=1, width=width, heads=1, head_width=1, vocabulary=vocabulary, head_pieces=pieces
        )
        head = Head(config, torch.nn.Parameter(torch.empty(vocabulary, width)))
        hidden = torch.empty(1, rows, width, requires_grad=True)
        labels = torch.empty(1, rows, dtype=torch.long)
    layer = Layer("head", head, ("hidden", "labels"), ("loss",))
    chain = Chain((layer,), layer.reads, "loss", {})
    return layer_costs(chain, {"hidden": hidden, "labels": labels}).layers[0]


@pytest.mark.parametrize(
    ("width", "vocabulary", "rows"), [(12288, 50257, 2048), (8192, 128256, 4096)]
)
def test_what_pieces_save_in_the_heads_of_large_models(
    width: int, vocabulary: int, rows: int
) -> None:
    """GPT-3 175B and a Llama of 70B: what the head needs beside the weight's own gradient."""
    logits_bytes, hidden_bytes = 4 * rows * vocabulary, 4 * rows * width
    weight_bytes, product = 4 * vocabulary * width, 2 * rows * vocabulary * width
    whole, *split = (head_cost(width, vocabulary, rows, pieces) for pieces in (1, 4, 16))
    # Logits and their logarithmic softmax; the latter is kept.
    assert whole.graph_bytes >= 2 * logits_bytes
    assert whole.kept_bytes >= logits_bytes
    assert whole.backward_flops == 2 * product
    for pieces, cost in zip((4, 16), split, strict=True):
        piece_bytes = 4 * rows * (-(-vocabulary // pieces // 64) * 64 + 64)
        few_bytes = 100 * rows
        assert cost.forward_bytes <= piece_bytes + hidden_bytes + few_bytes
        assert cost.graph_bytes <= piece_bytes + hidden_bytes + few_bytes
        assert cost.kept_bytes <= hidden_bytes + few_bytes
        # The gradients of the weight and of the normalised hidden state.
        assert cost.backward_bytes <= weight_bytes + piece_bytes + hidden_bytes + few_bytes
        assert cost.forward_flops == whole.forward_flops == product
        assert cost.backward_flops == 3 * product
