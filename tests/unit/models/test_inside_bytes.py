"""What products with matrices of few bits take inside themselves is bounded, and counted."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.models import quantised
from atomtrain.models.forms import Form
from atomtrain.models.quantised import Quantised, dequantise_in_torch, quantised_linear, wide

_FORMS = {
    "8 bits": Form(8),
    "nf4": Form(4),
    "mxfp4": Form(4, "mxfp4"),
    "nf4, published": Form(4, "nf4"),
    "fp8": Form(8, "fp8", (16, 16)),
    "steps of 4 bits": Form(4, "steps", (1, 64)),
    "steps of 8 bits": Form(8, "steps", (1, 64)),
    "codes of 8 bits": Form(8, "steps8", (1, 64)),
}
_ROWS, _INPUTS = 64, 128


def held(form: str) -> Quantised:
    torch.manual_seed(0)
    return _FORMS[form].packed(torch.randn(_ROWS, _INPUTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", _FORMS)
def test_pytorch_takes_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, form: str, dtype: torch.dtype
) -> None:
    packed = held(form)
    whole = dequantise_in_torch(*packed, dtype)
    monkeypatch.setattr(quantised, "_AT_ONCE", 10 * _INPUTS)  # the last part is smaller
    with StorageTracker() as tracker:
        made = dequantise_in_torch(*packed, dtype)
    assert torch.equal(made, whole)
    beside_bytes = tracker.peak_bytes - made.nbytes
    few = 4 * len(quantised.E4M3) + 4096  # the table of what codes mean, and scales
    assert 4 * 10 * _INPUTS < beside_bytes <= quantised._BESIDE_BYTES * 10 * _INPUTS + few


@pytest.mark.parametrize("form", _FORMS)
def test_a_product_and_its_backward_count_the_wide_matrix(form: str) -> None:
    codes, scales = held(form)
    inputs = torch.randn(3, _INPUTS, dtype=torch.bfloat16, requires_grad=True)
    wide_bytes = 2 * _ROWS * _INPUTS
    with StorageTracker() as tracker:
        product = quantised_linear(inputs, codes, scales)
        assert tracker.peak_bytes == wide_bytes + product.nbytes
        gradient = torch.ones_like(product)
        held_bytes = tracker.live_bytes
        tracker.reset_peak()
        product.backward(gradient)
        assert tracker.peak_bytes == held_bytes + wide_bytes + inputs.nbytes
        tracker.reset_peak()
        before_bytes = tracker.live_bytes
        wide(codes, scales, torch.bfloat16)
        assert tracker.peak_bytes == before_bytes + wide_bytes


def test_a_gpu_takes_what_pytorch_takes_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "_AT_ONCE", 1000)
    wide_bytes, beside_bytes = 2 * _ROWS * _INPUTS, 1000 * quantised._BESIDE_BYTES
    with FakeTensorMode(), torch.device("cuda"):
        codes, scales = _FORMS["nf4"].empty(_ROWS, _INPUTS, torch.empty(0))
        inputs = torch.empty(3, _INPUTS, dtype=torch.bfloat16)
        with StorageTracker() as tracker:
            quantised_linear(inputs, codes, scales)
    assert tracker.peak_bytes == wide_bytes + beside_bytes
