"""Parameter groups: what decays, and what Muon may update.

**Convention.** Weight decay is for what multiplies: parameters of two or more dimensions, embedding
and head among them, as GPT-3 and its open descendants have it. Norms and biases, of one dimension,
do not decay.

Muon is for hidden matrices: two dimensions, but no embedding, and no head, whose rows belong to
single tokens. Those, norms, biases and everything of another shape go to AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from atomtrain.errors import ConfigError

Source = nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]
Group = dict[str, Any]


def decay_groups(
    source: Source, weight_decay: float = 0.1, *, decay_embeddings: bool = True
) -> list[Group]:
    """Divide trainable parameters into those with weight decay and those without.

    Args:
        source: A model, parameters, or pairs of name and parameter.
        weight_decay: Of the first group; the second has 0.
        decay_embeddings: Whether the weights of `nn.Embedding` decay. Only a model tells which
            those are, so `False` needs one. A head that shares such a weight is not decayed either.

    Returns:
        At most two groups for an optimizer; an empty one is left out.

    Raises:
        ConfigError: nothing is trainable, or `decay_embeddings=False` without a model.
    """
    if not decay_embeddings and not isinstance(source, nn.Module):
        raise ConfigError(
            "decay_embeddings=False needs the model: a list of parameters does not say which of "
            "them are embeddings"
        )
    spared = set() if decay_embeddings else _embeddings(source)
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for _, parameter in _trainable(source):
        decays = parameter.ndim >= 2 and id(parameter) not in spared
        (decayed if decays else others).append(parameter)
    return _filled(
        {"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}
    )


def muon_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    hidden: Callable[[str, nn.Parameter], bool] | None = None,
) -> list[Group]:
    """Divide a model's trainable parameters into hidden matrices for Muon, and two for AdamW.

    Args:
        model: Its `nn.Embedding` modules tell what is no hidden matrix: their weights, and the
            head, that is the model's last matrix if it has as many rows as the largest of them.
        weight_decay: Of all parameters of two or more dimensions.
        hidden: Says by name and parameter which matrices are hidden, in place of that rule.

    Returns:
        At most three groups for `Muon`; an empty one is left out.

    Raises:
        ConfigError: nothing is trainable, or `hidden` chose what is no matrix.
    """
    hidden = hidden or _is_hidden(model)
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in _trainable(model):
        chosen = hidden(name, parameter)
        if chosen and parameter.ndim != 2:
            raise ConfigError(
                f"{name!r} has shape {list(parameter.shape)}; Muon updates matrices only: let "
                "hidden=... return False for it"
            )
        (matrices if chosen else rest).append(parameter)
    groups = decay_groups(rest, weight_decay) if rest else []
    muon = {"params": matrices, "weight_decay": weight_decay, "algorithm": "muon"}
    return _filled(muon, *({**group, "algorithm": "adamw"} for group in groups))


def _is_hidden(model: nn.Module) -> Callable[[str, nn.Parameter], bool]:
    others = _embeddings(model)
    rows = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    # Only the last one: a hidden matrix may happen to have as many rows as there are tokens.
    if rows and matrices and matrices[-1].shape[0] == max(rows):
        others.add(id(matrices[-1]))
    return lambda _, parameter: parameter.ndim == 2 and id(parameter) not in others


def _embeddings(model: Source) -> set[int]:
    assert isinstance(model, nn.Module)
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def _trainable(source: Source) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each trainable parameter once; a shared one under its first name."""
    items = source.named_parameters() if isinstance(source, nn.Module) else source
    seen: set[int] = set()
    for item in items:
        name, parameter = ("", item) if isinstance(item, Tensor) else item
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter
    if not seen:
        raise ConfigError("no parameter has requires_grad=True; nothing can be trained")


def _filled(*groups: Group) -> list[Group]:
    return [group for group in groups if group["params"]]
