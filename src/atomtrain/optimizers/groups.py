"""Parameter groups: what decays, and what Muon may update.

**Convention.** Weight decay is for what multiplies: parameters of two or more dimensions, embedding
and head among them, as GPT-3 and its open descendants have it. Norms and biases, of one dimension,
do not decay.

Muon is for hidden matrices: two dimensions, but no embedding, and no head, whose rows belong to
single tokens. Those, norms, biases and everything of another shape go to AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from atomtrain.errors import ConfigError

FACTOR = "lr_factor"
"""Of a group: by what the run's learning rate is multiplied for it; 1 where a group has none."""
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
        model: Its `nn.Embedding` modules tell what is not a hidden matrix: their weights, and the
            head, that is the model's last matrix if it has as many rows as the largest of them.
        weight_decay: Of all parameters of two or more dimensions.
        hidden: Says by name and parameter which matrices are hidden, in place of that rule.

    Returns:
        At most three groups for `Muon`; an empty one is left out.

    Raises:
        ConfigError: nothing is trainable, or `hidden` chose what is not a matrix.
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


def layer_groups(
    model: nn.Module, groups: Sequence[Group], layer_lr_decay: float, lr: float
) -> list[Group]:
    """Divide groups by layers, of which those nearer the input learn more slowly.

    Layers are the elements of the list (`nn.ModuleList` or `nn.Sequential`, none inside of another)
    with the most parameters. What the model names behind it (the last norm, the head) learns with
    `lr`, each layer below with `layer_lr_decay` times what the one above has, and what is named
    before the list (embeddings) as a layer below all (Howard and Ruder 2018, arXiv 1801.06146;
    Clark et al. 2020, arXiv 2003.10555).

    Args:
        model: Whose parameters the groups have.
        groups: For an optimizer, such as those of `decay_groups` or `muon_groups`.
        layer_lr_decay: Above 0 and at most 1; 1 gives the groups back.
        lr: Of the top.

    Returns:
        Groups with `lr` and `lr_factor` of their own; what else they have stays.

    Raises:
        ConfigError: the model has no such list.
    """
    if layer_lr_decay == 1:
        return list(groups)
    below = _layers_below_top(model)
    found: list[Group] = []
    for group in groups:
        by_depth: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_depth.setdefault(below[id(parameter)], []).append(parameter)
        for depth, members in sorted(by_depth.items()):
            factor = layer_lr_decay**depth
            found.append({**group, "params": members, "lr": lr * factor, FACTOR: factor})
    return found


def set_learning_rate(groups: Iterable[Group], lr: float) -> None:
    for group in groups:
        group["lr"] = lr * group.get(FACTOR, 1.0)


def _layers_below_top(model: nn.Module) -> dict[int, int]:
    """Return how many layers are above each parameter, by its `id`; a shared one counts where it is
    named first."""
    lists: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        nested = any(path.startswith(f"{outer}." if outer else "") for outer in lists)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not nested:
            lists[path] = module
    if not lists:
        raise ConfigError(
            f"layer_lr_decay needs a model with a list of layers (nn.ModuleList or nn.Sequential), "
            f"and {type(model).__name__} has none; give groups of your own with an lr each"
        )
    path, layers = max(lists.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))
    top = len(list(layers.children())) + 1
    inside: dict[int, int] = {}
    for index, layer in enumerate(layers.children()):
        for parameter in layer.parameters():
            inside.setdefault(id(parameter), top - 1 - index)
    below, passed = {}, False
    for name, parameter in model.named_parameters():
        in_list = name.startswith(f"{path}." if path else "")
        passed |= in_list
        below[id(parameter)] = inside[id(parameter)] if in_list else 0 if passed else top
    return below


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
