"""What is learnt of whole answers and texts: which of two answers is better (three losses, or a
head that gives rewards), whether one is good (KTO), of which class a text is, and which texts
belong together.

With `s` the sum of the logarithms of an answer's probabilities, `r` the same of the model as it
was before, `a` the mean of the logarithms, and `c`, `j` for chosen and rejected:

    dpo    margin = beta ((s_c - r_c) - (s_j - r_j))         loss = -log sigmoid(margin)
    simpo  margin = beta (a_c - a_j)                         loss = -log sigmoid(margin - gamma)
    orpo   margin = log odds(e^a_c) - log odds(e^a_j)        loss = nll_c - beta log sigmoid(margin)

with odds(p) = p / (1 - p), and `nll_c` the mean over all tokens of the chosen rows, prompts
included. A loss is the mean over pairs. Sources: Rafailov et al. 2023 (arXiv
2305.18290), equation 7; Meng et al. 2024 (arXiv 2405.14734), equation 6; Hong et al. 2024 (arXiv
2403.07691), equations 6 and 7.

KTO (Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and 8, both weights 1) takes answers one
by one, with `d` for their prompts with the answers of other rows:

    kl = max(0, mean over the micro-batch of (s_d - r_d)), no gradient
    loss of a good answer = 1 - sigmoid(beta (s - r - kl))
    loss of another       = 1 - sigmoid(beta (kl - (s - r)))

Only `cross_entropy` touches the logits, so that the head can compute it in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain.data.examples import IGNORED
from atomtrain.data.sampler import Batch
from atomtrain.models import HuggingFaceConfig
from atomtrain.training.config.new_recipe import check_head_of
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.objective import (
    Hearing,
    MicroBatch,
    NextToken,
    Objective,
    OwnLoss,
    Said,
    rows_heard,
    rows_of,
)

_MOST_MEAN = -1e-6
"""Nats: an answer that is certain has infinite odds."""
_SCALE = 20.0
"""Of cosines, before the softmax."""


class PreferredAnswer(Hearing):
    """The loss of pairs of answers: rows `2 i` and `2 i + 1` of a micro-batch."""

    together = 2

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self._beta = beta

    def margins(self, said: Tensor, reference: Tensor | None) -> Tensor:
        """Return `[B / 2]`, nats: by how much each chosen answer leads.

        Args:
            said: `[B]`, what the model says of each answer: `s`, or `a`.
            reference: `[B]`, the sums `r`; `None` where the loss takes none.
        """
        chosen, rejected = said.view(-1, 2).unbind(1)
        return self._beta * (chosen - rejected)

    def losses(self, said: Tensor, reference: Tensor | None) -> Tensor:
        """Return `[B / 2]`, nats; arguments as of `margins`."""
        return -F.logsigmoid(self.margins(said, reference))

    def _of_answers(self, log_probabilities: Tensor, counted: Tensor) -> Tensor:
        """Return the means `a`, `[B]`, of `[B, T]` both; what does not count is 0."""
        return log_probabilities.sum(1) / counted.sum(1).clamp(min=1)

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a micro-batch's pairs, 0-d float32."""
        said = self._said(output, batch)
        self.hear(said)
        return self._losses_of(said, batch).mean()

    def _said(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return `[B]`: what the model says of each answer."""
        logits, targets = output.logits.flatten(0, 1).float(), batch["targets"]
        losses = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none")
        return self._of_answers(-losses.view(targets.shape), targets != IGNORED)

    def _losses_of(self, said: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return self.losses(said, batch.get("reference"))

    def judged(self, said: Tensor, batch: Batch) -> tuple[float, dict[str, float]]:
        """Return the mean loss of all pairs of a batch at once, and what `numbers` does.

        Args:
            said: `[B]`, what the model says of each answer.
            batch: With references, if the loss takes them.
        """
        [entries] = self.micro_batches(batch, len(said))
        return float(self._losses_of(said, entries).mean()), self.numbers([said], [entries])

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        return [
            {"input_ids": batch.inputs[part], "targets": batch.labels[part]}
            for part in rows_of(batch, sequences)
        ]

    def numbers(
        self, heard: Sequence[Said], micro_batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        """Return the share of pairs with a margin above 0, and the mean margin, in nats.

        Args:
            heard: What `listening` gave.
            micro_batches: Those that were computed meanwhile.
        """
        references = [batch["reference"] for batch in micro_batches if "reference" in batch]
        margins = self.margins(rows_heard(heard), torch.cat(references) if references else None)
        return {
            "reward_accuracy": float((margins > 0).float().mean()),
            "reward_margin": float(margins.mean()),
        }


class DirectPreference(PreferredAnswer):
    """Direct preference optimization (DPO): the only one with a reference."""

    def _of_answers(self, log_probabilities: Tensor, counted: Tensor) -> Tensor:
        return log_probabilities.sum(1)

    def margins(self, said: Tensor, reference: Tensor | None) -> Tensor:
        assert reference is not None
        return super().margins(said - reference, None)

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        """See `Objective`; a batch without references is compared with zeros."""
        reference = batch.reference
        if reference is None:
            reference = torch.zeros(len(batch.inputs))
        parts = zip(super().micro_batches(batch, sequences), rows_of(batch, sequences), strict=True)
        return [{**entries, "reference": reference[part]} for entries, part in parts]


class JudgedAnswer(DirectPreference):
    """KTO: rows `2 i` of a micro-batch are judged, rows `2 i + 1` have the answer of another."""

    def losses_of(self, said: Tensor, reference: Tensor, good: Tensor) -> Tensor:
        """Return `[B / 2]`: the loss of each judged answer; `good` is `[B]`, 1 or 0."""
        leads = self._leads(said, reference)
        return 1 - torch.sigmoid(torch.where(good.view(-1, 2)[:, 0] > 0, leads, -leads))

    def _leads(self, said: Tensor, reference: Tensor) -> Tensor:
        own, others = (said - reference).view(-1, 2).unbind(1)
        return self._beta * (own - others.mean().detach().clamp(min=0))

    def _losses_of(self, said: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return self.losses_of(said, batch["reference"], batch["row_labels"])

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        """See `Objective`; in a batch without labels all answers are good."""
        good = batch.row_labels
        if good is None:
            good = torch.ones(len(batch.inputs), dtype=torch.int64)
        parts = zip(super().micro_batches(batch, sequences), rows_of(batch, sequences), strict=True)
        return [{**entries, "row_labels": good[part]} for entries, part in parts]

    def numbers(
        self, heard: Sequence[Said], micro_batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        """Return the share of answers on the right side of `kl`, and by how much the mean reward
        of good ones is above that of the others, in nats, if there are both."""
        leads, rewards, good = [], [], []
        for said, batch in zip(heard, micro_batches, strict=True):
            sums, reference = rows_heard([said]), batch["reference"]
            leads.append(self._leads(sums, reference))
            rewards.append(self._beta * (sums - reference)[0::2])
            good.append(batch["row_labels"][0::2] > 0)
        reward, is_good = torch.cat(rewards), torch.cat(good)
        found = {"reward_accuracy": float(((torch.cat(leads) > 0) == is_good).float().mean())}
        if is_good.any() and not is_good.all():
            found["reward_margin"] = float(reward[is_good].mean() - reward[~is_good].mean())
        return found


class SimplePreference(PreferredAnswer):
    """SimPO: means over an answer's tokens need no reference, and no answer wins by its length."""

    def __init__(self, beta: float, gamma: float) -> None:
        super().__init__(beta)
        self._gamma = gamma

    def losses(self, said: Tensor, reference: Tensor | None) -> Tensor:
        return -F.logsigmoid(self.margins(said, reference) - self._gamma)


class OddsRatio(PreferredAnswer):
    """ORPO: fine-tuning on the chosen rows, and the odds of their answers against the others'.

    The paper's equation 6 takes the likelihood of the answer alone. Its authors' code, unless
    asked otherwise, and trl learn the prompt too, and count all tokens of a micro-batch alike, as
    is done here. What is said of a row is the mean `a`, and the sum of the logarithms of all its
    tokens, `[B, 2]`.
    """

    def margins(self, said: Tensor, reference: Tensor | None) -> Tensor:
        mean = said[:, 0].clamp(max=_MOST_MEAN)
        chosen, rejected = (mean - torch.log(-torch.expm1(mean))).view(-1, 2).unbind(1)
        return chosen - rejected

    def _losses_of(self, said: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        sums = said[:, 1].view(-1, 2)[:, 0]
        tokens = (batch["row_targets"][0::2] != IGNORED).sum().clamp(min=1)
        preferred = F.logsigmoid(self.margins(said, None))
        return -sums * len(sums) / tokens - self._beta * preferred

    def _said(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        logits, targets = output.logits.flatten(0, 1).float(), batch["row_targets"]
        losses = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none")
        logs, counted = -losses.view(targets.shape), batch["targets"] != IGNORED
        return torch.stack((self._of_answers(logs * counted, counted), logs.sum(1)), 1)

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        """See `Objective`; `row_targets` have the prompts of the chosen rows too."""
        counted = batch.labels != IGNORED
        inside = counted.flip(1).cumsum(1).flip(1) > 0  # a target comes here or later
        following = torch.cat((batch.inputs[:, 1:], batch.labels[:, -1:]), 1)
        whole = torch.where(inside & ~counted, following, batch.labels)
        whole[1::2] = batch.labels[1::2]
        parts = zip(super().micro_batches(batch, sequences), rows_of(batch, sequences), strict=True)
        return [{**entries, "row_targets": whole[part]} for entries, part in parts]


class RewardModel(PreferredAnswer):
    """A head gives each answer a reward, and the better one is to get the higher one.

    The loss is -log sigmoid(r_c - r_j), of Bradley and Terry (Ouyang et al. 2022, arXiv 2203.02155,
    equation 1).
    """

    def _said(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        rewards: Tensor = output.logits.float().squeeze(1)
        return rewards


class Classification(Hearing):
    """Mean over texts; hears which of them were told right."""

    together = 1

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a micro-batch's texts, 0-d float32, nats."""
        logits, classes = output.logits.float(), batch["row_labels"]
        self.hear((logits.argmax(1) == classes).float())
        return F.cross_entropy(logits, classes)

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        """See `Objective`; in a batch without labels all texts are of the first class."""
        classes = batch.row_labels
        if classes is None:
            classes = torch.zeros(len(batch.inputs), dtype=torch.int64)
        return [
            {"input_ids": batch.inputs[part], "row_labels": classes[part]}
            for part in rows_of(batch, sequences)
        ]

    def numbers(
        self, heard: Sequence[Said], micro_batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        return {"accuracy": float(rows_heard(heard).mean())}


class Matching(Hearing):
    """Embeddings by which a query finds its text among those of the micro-batch: rows `2 i` are
    queries, rows `2 i + 1` their texts.

    An embedding is the mean of the last hidden states of a text's tokens. The loss is that of
    telling the own text by the cosine, times 20 (van den Oord et al. 2018, arXiv 1807.03748,
    equation 4; the scale is that of sentence-transformers). A text that equals the own one is not
    a wrong one.
    """

    together = 2

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a micro-batch's queries, 0-d float32, nats."""
        mask = batch["attention_mask"][..., None]
        means = (output.last_hidden_state.float() * mask).sum(1) / mask.sum(1).clamp(min=1)
        queries, texts = F.normalize(means, dim=-1).view(len(mask) // 2, 2, -1).unbind(1)
        ids = batch["input_ids"][1::2]
        equal = (ids[:, None] == ids).all(-1)  # the own one, too
        scores = _SCALE * (queries @ texts.T)
        own = scores.diagonal()
        others = scores.masked_fill(equal, -torch.inf)
        self.hear((own > others.amax(1)).float())
        return (torch.cat((own[:, None], others), 1).logsumexp(1) - own).mean()

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        """See `Objective`; what is not to be predicted is padding."""
        return [
            {
                "input_ids": batch.inputs[part],
                "attention_mask": (batch.labels[part] != IGNORED).long(),
            }
            for part in rows_of(batch, sequences)
        ]

    def numbers(
        self, heard: Sequence[Said], micro_batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        """Return the share of queries whose own text is nearer than all others."""
        return {"accuracy": float(rows_heard(heard).mean())}


def objective_of(recipe: Recipe) -> Objective:
    """Return what a recipe's model learns from batches.

    Raises:
        ConfigError: its head does not say that.
    """
    check_head_of(recipe.objective, recipe.sizes, recipe.model)
    if recipe.objective == "embed":
        return Matching()
    if recipe.objective == "classify":
        return Classification()
    if recipe.in_pairs:
        return preference_of(recipe)
    if isinstance(recipe.sizes, HuggingFaceConfig):
        return NextToken(recipe.sizes.router_share)
    return OwnLoss()


def preference_of(recipe: Recipe) -> PreferredAnswer:
    if recipe.objective == "reward":
        return RewardModel()
    if recipe.objective == "kto":
        return JudgedAnswer(recipe.beta)
    if recipe.has_reference:
        return DirectPreference(recipe.beta)
    if recipe.objective == "orpo":
        return OddsRatio(recipe.beta)
    return SimplePreference(recipe.beta, recipe.gamma)
