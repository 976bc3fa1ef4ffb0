"""Learning from pairs of answers: the published formulas, swapped as resident, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain.data.sampler import Batch
from atomtrain.engine.api import swap
from atomtrain.engine.execution.multi_device import DEVICE_NUMBER
from atomtrain.engine.options import Options
from atomtrain.models.hugging_face import build, read_config
from atomtrain.models.lora import adapted_layers, add_adapters
from atomtrain.models.lora_config import LoraConfig
from atomtrain.optimizers import AdamW
from atomtrain.training.setup.objective import IGNORED, rows_heard
from atomtrain.training.setup.objectives import (
    DirectPreference,
    JudgedAnswer,
    OddsRatio,
    PreferredAnswer,
    SimplePreference,
)
from tests.support.hugging_face_models import UNTIED, VOCABULARY, write_model

pytest.importorskip("transformers")
BETA = 0.3
OBJECTIVES = {
    "dpo": DirectPreference(BETA),
    "simpo": SimplePreference(2.0, 0.7),
    "orpo": OddsRatio(BETA),
    "kto": JudgedAnswer(BETA),
}
ROWS, CONTEXT, MICRO_BATCH = 8, 12, 4
GOOD = torch.tensor([1, 1, 0, 0, 0, 0, 1, 1])
"""Of judged answers, each with one of another row."""


class Output:
    """What a model returns."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def batch_of(generator: torch.Generator) -> Batch:
    """Return pairs whose answers begin and end where they like."""
    ids = torch.randint(VOCABULARY - 10, (ROWS, CONTEXT + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        first, last = sorted(torch.randint(1, CONTEXT, (2,), generator=generator).tolist())
        labels[row, :first] = IGNORED
        labels[row, last + 1 :] = IGNORED
    said = -20 * torch.rand(ROWS, generator=generator)
    return Batch(ids[:, :-1].contiguous(), labels, said, row_labels=GOOD)


def steps(objective: PreferredAnswer) -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(2)
    return [objective.micro_batches(batch_of(generator), MICRO_BATCH) for _ in range(3)]


def sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Return `[B]`: the sum of the answers' log-probabilities, by the definition."""
    logs = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
    return (logs * (labels != IGNORED)).sum(1)


def test_loss_and_rewards_are_those_of_the_published_formula() -> None:
    """Rafailov et al. 2023, equation 7, in the order in which the package `trl` computes it."""
    generator = torch.Generator().manual_seed(0)
    batch = batch_of(generator)
    assert batch.reference is not None
    logits = torch.randn(ROWS, CONTEXT, VOCABULARY, generator=generator, requires_grad=True)
    said = sums(logits, batch.labels)
    chosen, rejected = said[0::2], said[1::2]
    of_chosen, of_rejected = batch.reference[0::2], batch.reference[1::2]
    ratios = (chosen - rejected) - (of_chosen - of_rejected)
    expected = -F.logsigmoid(BETA * ratios).mean()
    rewards = BETA * (chosen - of_chosen), BETA * (rejected - of_rejected)

    objective = DirectPreference(BETA)
    micro_batches = objective.micro_batches(batch, ROWS)
    with objective.listening() as heard:
        loss = objective.loss(Output(logits), micro_batches[0])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    )
    torch.testing.assert_close(rows_heard(heard), said.detach())
    numbers = objective.numbers(heard, micro_batches)
    assert numbers["reward_accuracy"] == float((rewards[0] > rewards[1]).float().mean())
    assert numbers["reward_margin"] == pytest.approx(
        float((rewards[0] - rewards[1]).detach().mean())
    )
    assert 0 < numbers["reward_accuracy"] < 1
    objective.loss(Output(logits), micro_batches[0])
    assert len(heard) == 1, "nobody listens any more"


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_a_reference_are_those_of_their_papers(name: str) -> None:
    """In float64, written as Meng et al. 2024, equation 6, and Hong et al. 2024, 3 to 7, do."""
    batch = batch_of(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, CONTEXT, VOCABULARY, generator=generator, requires_grad=True)
    mean = sums(logits.double(), batch.labels) / (batch.labels != IGNORED).sum(1)
    chosen, rejected = mean[0::2], mean[1::2]
    if name == "simpo":
        leads = 2.0 * (chosen - rejected)
        expected = -torch.log(torch.sigmoid(leads - 0.7))
    else:
        odds_c, odds_r = (p / (1 - p) for p in (chosen.exp(), rejected.exp()))
        leads = torch.log(odds_c / odds_r)
        # The authors' code and trl learn all tokens of the chosen rows, their prompts too.
        every = batch._replace(labels=torch.cat((batch.inputs[:, 1:], batch.labels[:, -1:]), 1))
        last = (batch.labels != IGNORED).cumsum(1).argmax(1)
        beyond = torch.arange(CONTEXT) > last[:, None]
        labels = every.labels.masked_fill(beyond, IGNORED)[0::2]
        assert (labels != IGNORED).sum() > (batch.labels[0::2] != IGNORED).sum()
        learnt = sums(logits.double()[0::2], labels).sum() / (labels != IGNORED).sum()
        expected = -learnt - BETA * torch.log(torch.sigmoid(leads))
    objective = OBJECTIVES[name]
    micro_batches = objective.micro_batches(batch, ROWS)
    with objective.listening() as heard:
        loss = objective.loss(Output(logits), micro_batches[0])
    assert float(loss) == pytest.approx(float(expected.mean()), abs=1e-6)
    found, wanted = (torch.autograd.grad(value, logits)[0] for value in (loss, expected.mean()))
    torch.testing.assert_close(found, wanted)
    numbers = objective.numbers(heard, micro_batches)
    assert numbers["reward_margin"] == pytest.approx(float(leads.detach().mean()), abs=1e-6)
    assert numbers["reward_accuracy"] == float((leads > 0).float().mean())


@pytest.mark.parametrize("shift", [0.0, 60.0])
def test_kto_is_the_published_loss(shift: float) -> None:
    """In float64, as Ethayarajh et al. 2024 write equations 7 and 8; `shift` makes KL positive."""
    batch = batch_of(torch.Generator().manual_seed(0))
    assert batch.reference is not None
    batch = batch._replace(reference=batch.reference - shift)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, CONTEXT, VOCABULARY, generator=generator, requires_grad=True)
    ratio = sums(logits.double(), batch.labels) - batch.reference
    baseline = max(0.0, sum(float(r) for r in ratio[1::2].detach()) / (ROWS // 2))
    assert (baseline > 0) == (shift > 0)
    values = []
    for own, good in zip(ratio[0::2], GOOD[0::2], strict=True):
        margin = own - baseline if good else baseline - own
        values.append(1 - 1 / (1 + torch.exp(-BETA * margin)))
    expected = torch.stack(values).mean()
    objective = OBJECTIVES["kto"]
    micro_batches = objective.micro_batches(batch, ROWS)
    with objective.listening() as heard:
        loss = objective.loss(Output(logits), micro_batches[0])
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)
    found, wanted = (torch.autograd.grad(value, logits)[0] for value in (loss, expected))
    torch.testing.assert_close(found, wanted)
    assert float(found[1::2].abs().max()) == 0.0, "nothing is learnt from answers of other rows"
    numbers = objective.numbers(heard, micro_batches)
    own = BETA * ratio.detach()[0::2]
    better = float(own[[0, 3]].mean() - own[[1, 2]].mean())
    assert numbers["reward_margin"] == pytest.approx(better, abs=1e-5)
    right = [(r > BETA * baseline) == bool(g) for r, g in zip(own, GOOD[0::2], strict=True)]
    assert numbers["reward_accuracy"] == sum(map(bool, right)) / 4


@pytest.mark.parametrize(
    ("shift", "expected"), [(0.0, 0.464884877204895), (-7.0, 0.4687567949295044)]
)
def test_kto_has_the_loss_of_the_package_trl(shift: float, expected: float) -> None:
    """Numbers of trl 1.16.0: `KTOTrainer._compute_loss` got a model that says these sums.

    They are `-20 * torch.rand(4)`, three times, and `-24 * torch.rand(4)`, from one generator of
    seed 0, with `precompute_ref_logps`, beta 0.3 and both weights 1. KL is 0, and 1.38137.
    """
    generator = torch.Generator().manual_seed(0)
    own, other, of_own = (-20 * torch.rand(4, generator=generator) for _ in range(3))
    of_other = -24 * torch.rand(4, generator=generator) + shift
    good = torch.tensor([1, 0, 0, 1]).repeat_interleave(2)
    said, reference = (
        torch.stack(both, 1).flatten() for both in ((own, other), (of_own, of_other))
    )
    blank = torch.zeros(8, 2, dtype=torch.long)
    batch = Batch(blank, blank, reference, row_labels=good)
    loss, numbers = JudgedAnswer(0.3).judged(said, batch)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert numbers["reward_margin"] == pytest.approx(0.3136729300022125, abs=1e-6)


def test_odds_of_a_certain_answer_are_finite() -> None:
    said = torch.tensor([[0.0, 0.0], [-200.0, -200.0]], requires_grad=True)
    loss = OBJECTIVES["orpo"].margins(said, None).sum()
    assert loss.isfinite()
    assert torch.autograd.grad(loss, said)[0].isfinite().all()


def model_in(folder: Path, lora: LoraConfig | None) -> Any:
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    model = build(read_config(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name])
    if lora is not None:
        add_adapters(model, lora)
        with torch.no_grad():
            for name, layer in adapted_layers(model).items():
                for part, values in layer.beginning(partial(stored.get, f"{name}.weight"), name):
                    layer.get_parameter(part).copy_(values)
                layer.lora_B.weight.fill_(0.01)
    return model


LORA = LoraConfig(r=4, alpha=8.0)


@pytest.mark.usefixtures("assumed_times")
@pytest.mark.parametrize(
    ("name", "lora", "memory", "devices"),
    [
        ("dpo", None, "280KiB", 1), ("dpo", None, "1MiB", 1), ("dpo", LORA, "280KiB", 1),
        ("simpo", None, "280KiB", 1), ("orpo", None, "280KiB", 1), ("kto", None, "280KiB", 1),
        ("dpo", None, "280KiB", 2), ("kto", LORA, "280KiB", 2),
    ],
    ids=["swapped", "resident", "adapters", "simpo", "orpo", "kto", "devices", "kto-devices"],
)  # fmt: skip
def test_swapped_training_is_resident_training_bit_for_bit(
    name: str, lora: LoraConfig | None, memory: str, devices: int, tmp_path: Path
) -> None:
    write_model(tmp_path, UNTIED)
    expected, model = (model_in(tmp_path, lora) for _ in range(2))
    objective = OBJECTIVES[name]
    optimizer = AdamW([p for p in expected.parameters() if p.requires_grad], lr=1e-2)
    losses, told = [], []
    for micro_batches in steps(objective):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        with objective.listening() as heard:
            for batch in micro_batches:
                loss = objective.loss(expected(batch["input_ids"]), batch)
                (loss / len(micro_batches)).backward()
                total += float(loss.detach())
        optimizer.step()
        losses.append(total / len(micro_batches))
        told.append(objective.numbers(heard, micro_batches))
    assert losses[-1] != losses[0]
    with swap(
        model,
        steps(objective)[0][0],
        optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        device=["emulated"] * devices,
        device_memory=memory,
        loss=objective.loss,
        options=Options(micro_batches=ROWS // MICRO_BATCH),
    ) as engine:
        for micro_batches, loss, numbers in zip(steps(objective), losses, told, strict=True):
            with objective.listening() as heard:
                assert engine.step(micro_batches) == loss
            assert objective.numbers(heard, micro_batches) == numbers
        assert engine.last is not None
        assert engine.last.device_peak_bytes <= engine.plan.device_peak_bytes
        with objective.listening() as heard:
            engine.evaluate(micro_batches)
        engine.synchronize()
        for each, parameter in expected.named_parameters():
            assert torch.equal(model.get_parameter(each), parameter), each
    with torch.no_grad():
        model.eval()
        said = torch.cat([sums(model(b["input_ids"]).logits, b["targets"]) for b in micro_batches])
    if name not in ("dpo", "kto"):
        said /= torch.cat([(b["targets"] != IGNORED).sum(1) for b in micro_batches])
    found = rows_heard(heard)
    torch.testing.assert_close(found[:, 0] if name == "orpo" else found, said)


def test_what_devices_say_at_the_same_time_is_heard_in_the_order_of_the_micro_batches() -> None:
    objective = DirectPreference(BETA)
    order: list[float] = []
    with objective.listening() as heard:
        for number, said in ((1, 2.0), (0, 0.0), (1, 3.0), (0, 1.0)):
            token = DEVICE_NUMBER.set(number)
            objective.hear(torch.tensor([said]))
            DEVICE_NUMBER.reset(token)
        order = rows_heard(heard).tolist()
    assert order == [0.0, 1.0, 2.0, 3.0]
    with objective.listening() as again:
        objective.hear(torch.tensor([4.0]))
    assert again == [[4.0]]


@pytest.mark.usefixtures("assumed_times")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_head_in_pieces_says_the_same(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, UNTIED)
    results = []
    objective = OBJECTIVES[name]
    for pieces in (None, 3):
        with swap(
            model_in(tmp_path, None),
            steps(objective)[0][0],
            optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
            device="emulated",
            device_memory="1MiB",
            loss=objective.loss,
            options=Options(micro_batches=ROWS // MICRO_BATCH, head_pieces=pieces),
        ) as engine:
            with objective.listening() as heard:
                losses = [engine.step(micro_batches) for micro_batches in steps(objective)]
            results.append((losses, rows_heard(heard), engine.state_dict()))
    (one, said, state), (other, again, states) = results
    assert other == pytest.approx(one, rel=1e-5)
    torch.testing.assert_close(again, said)
    for each, tensor in state.items():
        torch.testing.assert_close(states[each], tensor, rtol=1e-4, atol=1e-5)
