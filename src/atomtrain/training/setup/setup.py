"""Puts a peer together: recipe, text, model, engine, swarm; from new, checkpoint or swarm."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from atomtrain.checkpoint import Checkpoint
from atomtrain.data.material import Draws
from atomtrain.data.sampler import SamplerConfig
from atomtrain.engine.api import Fitter, swap_fitted
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.devices import open_devices
from atomtrain.engine.devices.native import require_native
from atomtrain.engine.engine import Engine
from atomtrain.engine.execution.compiled import require_compilable
from atomtrain.engine.options import Options
from atomtrain.engine.state.precision import PRECISIONS
from atomtrain.errors import ConfigError
from atomtrain.files import require_writable
from atomtrain.models import HuggingFaceConfig, make_model, make_outline
from atomtrain.models.image_text import check_features, kind_of
from atomtrain.models.lora import narrowing_of
from atomtrain.models.neftune import with_noise
from atomtrain.progress import Progress
from atomtrain.settings import chosen
from atomtrain.swarm.packages import INSTALL, missing_packages
from atomtrain.topology import allowed_cores
from atomtrain.training.config.new_recipe import make_optimizer, model_name
from atomtrain.training.config.optimizing import precision_of
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.preflight import (
    FIRST_NAME,
    check_directory,
    make_directory,
    resumed_name,
    unnamed_run,
)
from atomtrain.training.config.recipe import Recipe, check_spending
from atomtrain.training.setup.budgets import (
    check_host_memory,
    device_memory_of,
)
from atomtrain.training.setup.fitting import Fit, Fitting, example_of
from atomtrain.training.setup.gradients import GradientCollector, GradientFragments, step_of
from atomtrain.training.setup.model_check import check_model, check_separation
from atomtrain.training.setup.objective import Objective
from atomtrain.training.setup.objectives import DirectPreference, objective_of
from atomtrain.training.setup.peering import (
    EngineFragments,
    forget_peers,
    manifest_of,
    most_fragments,
    swarm_config,
    with_addresses,
    with_rules,
)
from atomtrain.training.setup.references import with_references
from atomtrain.training.setup.sources import Source, averages_gradients, find_source
from atomtrain.training.setup.state import compiled_before, restore, saved_swarm
from atomtrain.training.setup.texts import Text, own_text

if TYPE_CHECKING:
    from atomtrain.swarm import Swarm, SwarmState

_log = logging.getLogger("atomtrain.training")


@dataclass
class Session:
    """One peer, ready to train."""

    options: TrainOptions
    recipe: Recipe
    run: str
    name: str
    directory: Path
    """Events, checkpoints and pictures of this peer."""
    text: Text
    engine: Engine
    model: nn.Module
    objective: Objective
    fit: Fit
    """How a step is divided."""
    model_folder: Path | None
    """Where the weights came from."""
    sampler: Draws
    swarm: Swarm | None
    fragments: EngineFragments
    step: int = 0
    """Steps done."""
    tokens: int = 0
    """Tokens that this peer trained on."""

    @property
    def fine_tunes(self) -> bool:
        """Whether the run began with a trained model."""
        return isinstance(self.recipe.sizes, HuggingFaceConfig)

    def close(self) -> None:
        """Leave the swarm and release the engine, even if leaving fails."""
        try:
            if self.swarm is not None:
                self.swarm.leave()
        finally:
            self.engine.close()


def open_session(options: TrainOptions, tell: Callable[[str], None] | None = None) -> Session:
    """Return a peer that is ready to train.

    Args:
        options: What the user said.
        tell: Gets a line where something is not as it could be.

    Raises:
        AtomError: any mistake in options, data, checkpoint, address or budget; nothing is changed.
    """
    require_writable(options.trace, "--trace")
    options = with_addresses(options)
    torch.set_num_threads(options.threads or len(allowed_cores()))
    run = options.run
    if run is None and options.join:
        run = swarm_config(options, None, "", None, 1).run
    run = run or unnamed_run(Path(model_name(options.model)).name, options.directory)
    name = options.name or _new_name(options, options.directory / run)
    directory = options.directory / run / name
    check_directory(directory, resume=options.resume)
    source = find_source(options, run, name, directory)
    try:
        return _assemble(options, source, run, name, directory, tell or _log.info)
    except BaseException:
        if source.swarm is not None:
            source.swarm.leave()
        raise


def _assemble(
    options: TrainOptions,
    source: Source,
    run: str,
    name: str,
    directory: Path,
    tell: Callable[[str], None],
) -> Session:
    recipe, text = source.recipe, source.text
    memory = device_memory_of(options, recipe)
    objective = objective_of(recipe)
    # What can be refused without the weights is refused before they take memory.
    outline = _outline_of(source, tell)
    kind = kind_of(outline)
    if kind is not None and kind.alike:  # any other one counts them when it is analysed
        example = example_of(recipe, 1, objective, text)
        check_features(outline, example["input_ids"], example["pixel_values"], recipe.model)
    if recipe.precision in PRECISIONS:
        outline.to(PRECISIONS[recipe.precision])
    if recipe.packed and isinstance(recipe.sizes, HuggingFaceConfig):
        check_separation(recipe.model, recipe.sizes, outline)
    gradients = averages_gradients(options, source)
    if options.spend_gradients:
        check_spending(recipe.clip_norm, recipe.precision, averaged=gradients)
    check_host_memory(outline, recipe, options)
    devices = open_devices(options.device, memory)
    try:
        if (compiling := _compiling(options, source, devices)) is True:
            require_compilable(devices[0])
        for device in devices:
            require_native(device, recipe.precision)
        torch.manual_seed(recipe.seed)
        model = make_model(recipe.sizes, recipe.lora, train_tower=recipe.train_tower)
        model = with_noise(model, recipe.neftune_noise_alpha)
    except BaseException:
        for device in devices:
            device.close()
        raise
    fitting = Fitting(options, source, objective)
    engine = _open_engine(
        model, fitting, recipe, devices, objective,
        dataclasses.replace(options, compile=compiling), gradients=gradients, plan=source.plan,
    )  # fmt: skip
    fit, example = fitting.fit, fitting.example
    engine.recording = options.trace is not None
    try:
        fragments = GradientFragments(engine) if gradients else _fragments(engine, source)
        if source.weights is not None:
            source.weights.load(engine)
        if source.weights is not None and source.checkpoint is None:
            check_model(engine, recipe, options, objective, example)
        if isinstance(objective, DirectPreference):  # the model is as it was before it learns
            text = with_references(text, engine, objective, fit.micro_batch, recipe, directory)
        if source.checkpoint is not None:
            with Progress("reading the checkpoint"):
                restore(engine, source.checkpoint)
        config = SamplerConfig(
            context_tokens=recipe.context, sequences=recipe.sequences, seed=recipe.seed
        )
        session = Session(
            options=options,
            recipe=recipe,
            run=run,
            name=name,
            directory=directory,
            text=text,
            engine=engine,
            model=model,
            objective=objective,
            fit=fit,
            model_folder=None if source.weights is None else source.weights.folder,
            sampler=text.material.sampler(config, name),
            swarm=source.swarm,
            fragments=fragments,
        )
        _enter_swarm(session, source, tell)
    except BaseException:
        engine.close()
        raise
    return session


def _outline_of(source: Source, tell: Callable[[str], None]) -> nn.Module:
    """Return the model that is trained, without memory; tell which matrices cannot be narrow."""
    recipe, tower = source.recipe, source.recipe.train_tower
    outline = make_outline(recipe.sizes, recipe.lora, train_tower=tower)
    if source.weights is not None and recipe.lora is not None and recipe.lora.bits is not None:
        found = narrowing_of(source.weights.outline, recipe.lora, in_tower=tower)
        if (line := found.told(recipe.lora.bits)) is not None:
            tell(line)
    return outline


def _open_engine(
    model: nn.Module,
    fit: Fitter,
    recipe: Recipe,
    devices: Sequence[Device],
    objective: Objective,
    options: TrainOptions,
    *,
    gradients: bool,
    plan: Mapping[str, Any] | None = None,
) -> Engine:
    settings = {
        "plan": plan,
        "clip_norm": recipe.clip_norm or None,
        "precision": precision_of(recipe.precision),
        "gradient_dtype": recipe.gradient_dtype,
        "profile": "again" if options.profile_again else not options.no_profile,
    }
    return swap_fitted(
        model,
        fit,
        optimizer=GradientCollector if gradients else lambda _: make_optimizer(model, recipe),
        device=devices,
        loss=objective.loss,
        options=Options(**{**chosen(options, Options), **settings}),
    )


def _compiling(
    options: TrainOptions, source: Source, devices: Sequence[Device]
) -> bool | Literal["auto"]:
    """Return whether layers are compiled: a resumed run does as before, for the same bits.

    On other devices it has others anyway, and chooses anew. Where its layers cannot be compiled any
    more, it is refused, not changed.
    """
    if options.compile != "auto" or source.checkpoint is None:
        return options.compile
    return compiled_before(source.checkpoint, devices)


def _fragments(engine: Engine, source: Source) -> EngineFragments:
    """Divide the parameters as the run or the checkpoint does, or into as few as rounds serve."""
    if source.swarm is not None:
        return EngineFragments(engine, like=source.swarm.manifest.fragment_elements)
    saved = {} if source.checkpoint is None else source.checkpoint.meta.get("swarm", {})
    if saved:
        return EngineFragments(engine, like=saved["fragment_elements"])
    return EngineFragments(engine, most=most_fragments(engine, source.recipe.local_steps))


def _enter_swarm(session: Session, source: Source, tell: Callable[[str], None]) -> None:
    """Join the swarm that was found, found one, or stay alone."""
    checkpoint, options = source.checkpoint, session.options
    saved: SwarmState | None = None
    if checkpoint is not None:
        session.step = checkpoint.step
        session.tokens = int(checkpoint.meta["tokens"])
        saved = saved_swarm(checkpoint)
    if missing_packages():
        if options.run is not None or options.is_demo:
            tell(f"trains alone: others can join only where {INSTALL} has been run")
    elif session.swarm is not None:
        _join_swarm(session, session.swarm, saved)
    elif options.run is not None or saved is not None:
        _found_swarm(session, checkpoint, saved)


def _join_swarm(session: Session, swarm: Swarm, saved: SwarmState | None) -> None:
    """Take the run's update and anchors, or go on from those of a checkpoint."""
    swarm.use_judge(_judge(session))
    if swarm.manifest.fragment_elements != session.fragments.elements:
        raise ConfigError(
            f"the run {session.run!r} divides its model otherwise than this version does; "
            "use the version of atomtrain that its founder uses"
        )
    if isinstance(session.fragments, GradientFragments):
        recipe = Recipe.from_json(swarm.manifest.payload["recipe"])
        swarm.use_update(step_of(recipe, session.model, session.fragments))
    if saved is not None:
        swarm.load_state_dict(saved)
        swarm.rebase(session.fragments)
    else:
        swarm.download(session.fragments)
        steps = [peer.steps for peer in swarm.peers() if not peer.is_self]
        session.step = max([session.step, *steps])
    if isinstance(session.fragments, GradientFragments):
        session.fragments.forget(0)
        session.step = swarm.version


def _found_swarm(session: Session, checkpoint: Checkpoint | None, saved: SwarmState | None) -> None:
    """Open the run to others."""
    from atomtrain.swarm import Swarm

    options = session.options
    make_directory(session.directory)
    if checkpoint is None:
        forget_peers(session.directory.parent)
    else:
        options = with_rules(options, checkpoint.meta.get("swarm", {}).get("rules", {}))
    recipe, tokenizer = session.recipe, session.text.tokenizer
    config = swarm_config(
        options, session.run, session.name, session.directory, recipe.local_steps,
        len(session.fragments.elements),
    )  # fmt: skip
    manifest = manifest_of(
        session.run, recipe, tokenizer.to_json(), tokenizer.separator_text,
        session.fragments.elements,
    )  # fmt: skip
    update = None
    if isinstance(session.fragments, GradientFragments):
        update = step_of(recipe, session.model, session.fragments)
        session.fragments.forget(0)
    born_s = None if saved is None else float(saved.meta.get("born_s", 0.0))
    session.swarm = Swarm.found(
        config, manifest, session.fragments, update, born_s, _judge(session)
    )
    if saved is not None:
        session.swarm.load_state_dict(saved)


def _judge(session: Session) -> Callable[[], float]:
    """Return the loss of the model as it is, on a few sequences of this peer's own text."""
    recipe, size = session.recipe, session.fit.micro_batch
    batch = own_text(session.text.material, session.sampler, recipe.context, size)
    batches = session.objective.micro_batches(batch, size)
    return lambda: session.engine.evaluate(batches)


def _new_name(options: TrainOptions, run: Path) -> str:
    if options.resume:
        return resumed_name(run)
    return f"peer-{secrets.token_hex(3)}" if options.join else FIRST_NAME
