"""Losses and gradients of preferences are those of the package `trl`, on the same batch."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.data.sampler import Batch
from atomtrain.training.setup.objective import IGNORED
from atomtrain.training.setup.objectives import (
    DirectPreference,
    JudgedAnswer,
    OddsRatio,
    PreferredAnswer,
    SimplePreference,
)

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
VOCABULARY, BETA, GAMMA = 23, 0.3, 0.7
PROMPTS, ENDS = (3, 5, 2), ((9, 12), (7, 8), (12, 5))
"""Of three pairs: tokens of the prompt, and of the chosen and the rejected row."""


class Bigrams(nn.Module):
    """A language model that trl's trainers can ask, in both ways that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        logits = self.table[input_ids]
        if labels is None:
            return SimpleNamespace(logits=logits)
        following = labels[:, 1:]
        logs = logits[:, :-1].log_softmax(-1).gather(2, following.clamp(min=0)[..., None])
        said = logs.squeeze(2) * (following != IGNORED)
        none = torch.zeros_like(said)
        return SimpleNamespace(log_probs=said, entropy=none, mean_logits=none, is_top1=none.bool())


class Rows:
    """Rows `2 i` and `2 i + 1` have one prompt; of judged answers the second is another row's."""

    def __init__(self) -> None:
        longest = max(max(ends) for ends in ENDS)
        self.ids = torch.randint(1, VOCABULARY, (2 * len(ENDS), longest))
        self.ids[1::2, : max(PROMPTS)] = self.ids[0::2, : max(PROMPTS)]
        places = torch.arange(longest)
        begins = torch.tensor(PROMPTS).repeat_interleave(2)[:, None]
        ends = torch.tensor(ENDS).flatten()[:, None]
        self.mask = (places < ends).long()
        self.ids *= self.mask
        self.answers = (places >= begins) & (places < ends)
        self.reference = -20 * torch.rand(len(self.ids))
        self.good = torch.tensor([1, 0, 1]).repeat_interleave(2)
        labels = self.ids[:, 1:].masked_fill(~self.answers[:, 1:], IGNORED)
        self.batch = Batch(self.ids[:, :-1], labels, self.reference, row_labels=self.good)

    def concatenated(self) -> dict[str, Tensor]:
        """Return what the trainers of CPO and ORPO get."""
        labels = self.ids.masked_fill(~self.answers, IGNORED)
        parts = {"input_ids": self.ids, "attention_mask": self.mask, "labels": labels}
        return {
            f"{kind}_{name}": rows[first::2]
            for first, kind in enumerate(("chosen", "rejected"))
            for name, rows in parts.items()
        }

    def stacked(self) -> dict[str, Tensor]:
        """Return what the trainer of DPO gets: chosen rows before rejected ones."""
        order = torch.tensor([*range(0, len(self.ids), 2), *range(1, len(self.ids), 2)])
        return {
            "input_ids": self.ids[order],
            "attention_mask": self.mask[order],
            "completion_mask": self.answers[order].long(),
            "ref_chosen_logps": self.reference[0::2],
            "ref_rejected_logps": self.reference[1::2],
        }

    def judged(self) -> dict[str, Tensor]:
        """Return what the trainer of KTO gets."""
        parts = {"input_ids": self.ids, "attention_mask": self.mask}
        parts["completion_mask"] = self.answers.long()
        return {
            **{name: rows[0::2] for name, rows in parts.items()},
            **{f"KL_{name}": rows[1::2] for name, rows in parts.items()},
            "label": self.good[0::2],
            "ref_logps": self.reference[0::2],
            "ref_KL_logps": self.reference[1::2],
        }


def trainer(kind: Any, model: nn.Module, **settings: Any) -> Any:
    """Return a trainer that can compute a loss and nothing else."""
    made = object.__new__(kind)
    same = {name: lambda values: values for name in ("gather", "gather_for_metrics")}
    made.accelerator = SimpleNamespace(device=torch.device("cpu"), **same)
    usual = {
        "model": model, "beta": BETA, "aux_loss_enabled": False, "label_smoothing": 0.0,
        "is_encoder_decoder": False, "padding_value": 0, "pad_token_id": 0, "alpha": 0.0,
        "precompute_ref_logps": True, "ld_alpha": None, "use_weighting": False, "_tp_size": 1,
        "_total_train_tokens": 0, "_metrics": defaultdict(lambda: defaultdict(list)),
    }  # fmt: skip
    for name, value in {**usual, **settings}.items():
        setattr(made, name, value)
    return made


def loss_of_trl(name: str, model: nn.Module, rows: Rows) -> Tensor:
    if name == "orpo":
        from trl.experimental.orpo import ORPOTrainer

        loss, _ = trainer(ORPOTrainer, model).get_batch_loss_metrics(model, rows.concatenated())
    elif name == "simpo":
        from trl.experimental.cpo import CPOTrainer

        settings = {"loss_type": "simpo", "simpo_gamma": GAMMA, "cpo_alpha": 0.0}
        asked = trainer(CPOTrainer, model, **settings)
        loss, _ = asked.get_batch_loss_metrics(model, rows.concatenated())
    elif name == "dpo":
        from trl import DPOTrainer

        sigmoid = {"loss_types": ["sigmoid"], "loss_weights": [1.0]}
        asked = trainer(DPOTrainer, model, f_divergence_type="reverse_kl", **sigmoid)
        loss = asked._compute_loss(model, rows.stacked(), False)
    else:
        from trl import KTOTrainer

        weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
        asked = trainer(KTOTrainer, model, loss_type="kto", calculate_KL=True, **weights)
        loss = asked._compute_loss(model, rows.judged(), False)
    return loss


@pytest.mark.parametrize("shift", [0.0, 30.0], ids=["as it is", "KL above 0"])
@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("dpo", DirectPreference(BETA)), ("simpo", SimplePreference(BETA, GAMMA)),
        ("orpo", OddsRatio(BETA)), ("kto", JudgedAnswer(BETA)),
    ],
    ids=["dpo", "simpo", "orpo", "kto"],
)  # fmt: skip
def test_loss_and_gradient_are_those_of_trl(
    name: str, objective: PreferredAnswer, shift: float
) -> None:
    torch.manual_seed(3)
    model, rows = Bigrams(), Rows()
    rows.reference -= shift
    expected = loss_of_trl(name, model, rows)
    [entries] = objective.micro_batches(rows.batch, len(rows.ids))
    found = objective.loss(model(entries["input_ids"]), entries)
    assert float(found) == pytest.approx(float(expected), abs=1e-6)
    wanted, gradient = (torch.autograd.grad(each, model.table)[0] for each in (expected, found))
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)
    assert gradient.abs().max() > 1e-3
