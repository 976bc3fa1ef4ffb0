"""Between engine, model and checkpoint: one shard per layer, parameters beside optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.checkpoint import Checkpoint, open_checkpoint
from atomtrain.data.tokenizer import Tokenizer, read_tokenizer
from atomtrain.engine.devices.device import Device
from atomtrain.engine.engine import Engine
from atomtrain.errors import CheckpointError, PlanError
from atomtrain.models import make_empty
from atomtrain.models.gpt_config import CONFIG_FILE
from atomtrain.models.hugging_face import read_config
from atomtrain.models.lora import adapted_layers
from atomtrain.models.lora_config import LoraConfig
from atomtrain.models.making import Sizes, make_outline
from atomtrain.models.weights.files import is_finite
from atomtrain.planning.plan.kept import KeptPlan
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.adapters import Adapters
from atomtrain.training.setup.budgets import check_resident
from atomtrain.training.setup.peft_folder import ADAPTER_CONFIG, read_peft

if TYPE_CHECKING:
    from atomtrain.swarm import SwarmState

PARAMETER = "parameter"
SWARM_SHARD = "swarm"
Put = Callable[[str, Tensor, Tensor], None]
"""Gets a name, the model's tensor, and what a checkpoint has for it."""


def shards_of(engine: Engine) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield each layer's tensors, `NAME/parameter` and for instance `NAME/exp_avg`.

    Parameters are those of `Engine.state_dict`: float32 masters, where there are some. The tensors
    may share the engine's memory: write them before the next step. Of a model with adapters only
    those are there.
    """
    engine.synchronize()
    parameters = dict(engine.model.named_parameters())
    whole = not adapted_layers(engine.model)
    covered: set[str] = set()
    for layer, names in engine.layers().items():
        shard: dict[str, Tensor] = {}
        for name in names:
            if not parameters[name].requires_grad and not whole:
                continue
            shard[f"{name}/{PARAMETER}"] = engine.masters.read(parameters[name])
            for key, value in engine.masters.moments(parameters[name]).items():
                if isinstance(value, Tensor):
                    shard[f"{name}/{key}"] = value
        covered.update(names)
        if shard or whole:
            yield layer, shard
    buffers: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, buffer in engine.model.named_buffers():
        # Memory that several share can be written once only.
        storage = buffer.untyped_storage()
        alone = storage.nbytes() == buffer.nbytes and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        buffers[f"{name}/{PARAMETER}"] = buffer if alone else buffer.clone()
    if buffers:
        yield "buffers", buffers


def loss_scale_of(engine: Engine) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of the loss scale, `None` if losses are not scaled."""
    return None if engine.loss_scale is None else engine.loss_scale.state()


def counts_of(engine: Engine) -> dict[str, Any]:
    """Return what a checkpoint keeps of an optimizer's plain numbers: of groups, and of each
    parameter's state."""
    state = {
        name: {key: value for key, value in own.items() if isinstance(value, int | float)}
        for name, own in engine.optimizer_state().items()
    }
    groups = [each for each in engine.optimizer_counts() if isinstance(each[-1], int | float)]
    return {"groups": groups, "state": {name: own for name, own in state.items() if own}}


def compiling_of(engine: Engine) -> dict[str, Any]:
    """Return what a checkpoint keeps of whether layers are compiled."""
    return {"compiled": engine.compiling.compiled, "devices": _kind_of(engine.devices)}


def compiled_before(checkpoint: Checkpoint, devices: Sequence[Device]) -> bool | Literal["auto"]:
    """Return whether a checkpoint's layers were compiled; `"auto"` if it was of other devices.

    Raises:
        CheckpointError: it does not say so as `compiling_of` does.
    """
    kept = checkpoint.meta.get("compiling", {})
    compiled = kept.get("compiled", False) if isinstance(kept, dict) else None
    if not isinstance(compiled, bool):
        raise CheckpointError(
            f"{checkpoint.path} does not say whether its layers were compiled; it was not written "
            "by 'atom train'"
        )
    return compiled if kept.get("devices") == _kind_of(devices) else "auto"


def plan_before(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return what a checkpoint has of the plan that it was trained by; older ones have nothing.

    Raises:
        CheckpointError: it has something that is not a plan.
    """
    kept: Mapping[str, Any] | None = checkpoint.meta.get("plan")
    try:
        return None if kept is None else KeptPlan.from_json(kept).to_json()
    except PlanError as error:
        raise CheckpointError(
            f"{checkpoint.path} holds what is not a plan ({error}); give an earlier checkpoint"
        ) from error


def _kind_of(devices: Sequence[Device]) -> str:
    return f"{len(devices)} x {devices[0].torch_device.type}"


def restore(engine: Engine, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's tensors back into the engine.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    engine.synchronize()
    parameters = dict(engine.model.named_parameters(remove_duplicate=False))

    def put(name: str, target: Tensor, tensor: Tensor) -> None:
        if name in parameters:
            engine.masters.write(parameters[name], tensor)
        else:
            target.copy_(tensor)

    counts = checkpoint.meta.get("counts", {"groups": [], "state": {}})
    numbers = dict(counts["state"])
    # Layer by layer: all moments at once may be more than memory holds.
    for moments in _fill(engine.model, checkpoint, put):
        state: dict[str, dict[str, Any]] = {
            name: {kind: tensor.clone() for kind, tensor in tensors.items()}
            for name, tensors in moments.items()
        }
        engine.load_optimizer_state(
            {name: {**numbers.pop(name, {}), **own} for name, own in state.items()}
        )
    engine.load_optimizer_state(numbers)  # of state that has no tensors
    for number, key, value in counts["groups"]:
        engine.optimizer.param_groups[number][key] = value
    engine.refresh_buffers()
    if engine.loss_scale is not None and checkpoint.meta.get("loss_scale") is not None:
        engine.loss_scale.load_state(checkpoint.meta["loss_scale"])


def _put(_: str, target: Tensor, tensor: Tensor) -> None:
    target.copy_(tensor)


def _fill(
    model: nn.Module, checkpoint: Checkpoint, put: Put = _put
) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Put parameters and buffers into the model; yield each shard's rest by name and kind."""
    targets = {**dict(model.named_buffers()), **model.state_dict()}
    whole = not adapted_layers(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = {name for name, p in model.named_parameters() if whole or p.requires_grad}
    for shard, tensors in checkpoint.shards():
        if shard.startswith(SWARM_SHARD):
            continue
        rest: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, kind = key.rpartition("/")
            if kind == PARAMETER:
                _check(targets, name, tensor, checkpoint, finite=name in parameters)
                with torch.no_grad():
                    put(name, targets[name], tensor)
                missing.discard(name)
            else:
                rest.setdefault(name, {})[kind] = tensor
        yield rest
    if missing:
        raise CheckpointError(f"{checkpoint.path} lacks the parameter {min(missing)!r}")


def _check(
    targets: Mapping[str, Tensor],
    name: str,
    tensor: Tensor,
    checkpoint: Checkpoint,
    *,
    finite: bool,
) -> None:
    """Check that the model has a tensor of this name and shape, and that parameters are finite:
    a buffer may be a mask of infinities."""
    target = targets.get(name)
    if finite and not is_finite(tensor):
        raise CheckpointError(
            f"{checkpoint.path} holds {name!r} with values that are not numbers (NaN or "
            "infinite); give an earlier checkpoint"
        )
    if target is None or target.shape != tensor.shape:
        has = "no such parameter" if target is None else f"shape {list(target.shape)}"
        raise CheckpointError(
            f"{checkpoint.path} is of another model: its {name!r} has shape "
            f"{list(tensor.shape)}, the model has {has}"
        )


def saved_swarm(checkpoint: Checkpoint) -> SwarmState | None:
    """Return what a checkpoint keeps of the swarm, its tensors cloned; `None` if nothing."""
    if SWARM_SHARD not in checkpoint.tensor_names:
        return None
    from atomtrain.swarm import SwarmState

    tensors = {name: tensor.clone() for name, tensor in checkpoint.shard(SWARM_SHARD).items()}
    return SwarmState(tensors, checkpoint.meta["swarm"]) if tensors else None


def recipe_of(checkpoint: Checkpoint) -> tuple[Recipe, Tokenizer]:
    """Return the recipe and the tokenizer of a checkpoint.

    Raises:
        CheckpointError: the checkpoint is none of `atom train`.
    """
    try:
        recipe = Recipe.from_json(checkpoint.meta["recipe"])
        text, separator = checkpoint.texts["tokenizer.json"], checkpoint.meta["separator"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} has no {error}; it was not written by 'atom train'"
        ) from error
    tokenizer = Tokenizer.from_json(text, separator)
    tokenizer.check_room(recipe.sizes.vocabulary, str(checkpoint.path))
    return recipe, tokenizer


def data_of(checkpoint: Checkpoint) -> tuple[tuple[str, ...], str | None]:
    """Return the sources of a checkpoint's run, and what its loss was measured on.

    Raises:
        CheckpointError: they are not named as `atom train` names them.
    """
    data = checkpoint.meta.get("data") or []
    validation = checkpoint.meta.get("validation")
    known = isinstance(data, list) and all(isinstance(each, str) for each in data)
    if not known or not isinstance(validation, str | None):
        raise CheckpointError(
            f"{checkpoint.path} names its data as {str(data)[:40]!r}; it was not written by 'atom "
            "train'"
        )
    return tuple(data), validation


def model_of(checkpoint: Checkpoint) -> tuple[nn.Module, Tokenizer]:
    """Return the model (in evaluation mode, on the CPU) and the tokenizer of a checkpoint.

    Raises:
        CheckpointError: the checkpoint is none of `atom train`.
    """
    recipe, tokenizer = recipe_of(checkpoint)
    if recipe.lora is not None:
        return Adapters.of_checkpoint(checkpoint, recipe).merged_model().eval(), tokenizer
    model = make_empty(recipe.sizes)
    for _ in _fill(model, checkpoint):
        pass  # moments are not needed
    return model.eval(), tokenizer


_USUAL_CONTEXT = 4096


class Trained(NamedTuple):
    """A model in memory, in evaluation mode, on the CPU."""

    model: nn.Module
    tokenizer: Tokenizer
    context: int
    """Tokens that it looks back at most."""
    recipe: Recipe | None
    """How it was trained, if a checkpoint tells."""
    sizes: Sizes


def open_trained(path: Path) -> Trained:
    """Return the model of a checkpoint, of a run's folder or of a Hugging Face folder.

    Of a folder with adapters it is the model that they name, with them in it.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
        ConfigError: no configuration that can be read.
        DataError: a folder without weights or tokenizer, or with those of another model.
    """
    if (path / CONFIG_FILE).is_file() or (path / ADAPTER_CONFIG).is_file():
        adapted = (path / ADAPTER_CONFIG).is_file()
        found = read_peft(path) if adapted else Adapters(LoraConfig(), read_config(path), path)
        sizes = found.sizes
        tokenizer = read_tokenizer(found.folder)
        tokenizer.check_room(sizes.vocabulary, str(found.folder))
        check_resident(found.weights.outline, str(path))
        model = found.merged_model()
        return Trained(model.eval(), tokenizer, sizes.context or _USUAL_CONTEXT, None, sizes)
    checkpoint = open_checkpoint(path)
    recipe, _ = recipe_of(checkpoint)
    check_resident(make_outline(recipe.sizes), str(path))
    model, tokenizer = model_of(checkpoint)
    return Trained(model, tokenizer, recipe.sizes.context or recipe.context, recipe, recipe.sizes)
