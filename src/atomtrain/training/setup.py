"""Puts a peer together: recipe, text, model, engine, swarm; from new, checkpoint or swarm."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.checkpoint import Checkpoint, load_latest
from atomtrain.data import (
    Prepared,
    Sampler,
    SamplerConfig,
    Tokenizer,
    default_cache,
    prepare,
    read_corpus,
)
from atomtrain.errors import ConfigError, DataError, PlanError, SwarmError
from atomtrain.models import GPT
from atomtrain.planning.search import fits
from atomtrain.reporting.files import require_writable
from atomtrain.swapping.device import Device
from atomtrain.swapping.devices import open_device
from atomtrain.swapping.engine import Engine
from atomtrain.swapping.machines import host_memory_bytes
from atomtrain.swapping.opening import swap
from atomtrain.swapping.options import Options
from atomtrain.training.optimizing import (
    SMALLEST_STATE,
    host_bytes_per_parameter,
    make_optimizer,
)
from atomtrain.training.options import TrainOptions
from atomtrain.training.peering import EngineFragments, manifest_of, swarm_config, with_rules
from atomtrain.training.recipe import Recipe, amended, new_recipe
from atomtrain.training.state import recipe_of, restore, swarm_tensors
from atomtrain.units import format_bytes, format_count

if TYPE_CHECKING:
    from atomtrain.swarm import Swarm

_SMALL_BUDGETS = {"demo": ("40MiB", "96MiB"), "tiny": ("8MiB", "64MiB")}
"""Default budgets that make small models larger than their device: emulated, and CUDA, whose
libraries take a workspace of their own."""
CHECKPOINTS = "checkpoints"
_log = logging.getLogger("atomtrain.training")
_MOST_TOKENS_A_MICRO_BATCH = 4096


class Text(NamedTuple):
    """What is trained on."""

    data: str | None
    """As the user named it; `None` is the demo corpus."""
    sha256: str
    prepared: Prepared


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
    model: GPT
    micro_batch: int
    """Sequences of a micro-batch."""
    sampler: Sampler
    swarm: Swarm | None
    fragments: EngineFragments
    step: int = 0
    """Steps done."""
    tokens: int = 0
    """Tokens that this peer trained on."""

    def close(self) -> None:
        """Leave the swarm and release the engine."""
        if self.swarm is not None:
            self.swarm.leave()
        self.engine.close()


@dataclass(frozen=True)
class _Source:
    """What a peer starts from."""

    recipe: Recipe
    text: Text
    checkpoint: Checkpoint | None = None
    swarm: Swarm | None = None


def open_session(options: TrainOptions) -> Session:
    """Return a peer that is ready to train.

    Raises:
        AtomError: any mistake in options, data, checkpoint, address or budget; nothing is changed.
    """
    require_writable(options.trace, "--trace")
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    run, name = options.run, options.name or _new_name(options)
    if run is None and options.join:
        run = swarm_config(options, None, name, None, 1).run
    run = run or f"{options.model or 'demo'}-{time.strftime('%m%d-%H%M%S')}"
    directory = options.directory / run / name
    _check_directory(options, directory)
    source = _source(options, run, name, directory)
    try:
        return _assemble(options, source, run, name, directory)
    except BaseException:
        if source.swarm is not None:
            source.swarm.leave()
        raise


def _assemble(
    options: TrainOptions, source: _Source, run: str, name: str, directory: Path
) -> Session:
    recipe = source.recipe
    memory = _device_memory(options, recipe)
    # Everything that can be refused is refused before the weights take memory.
    with torch.device("meta"):
        outline = GPT(recipe.sizes)
    if recipe.precision == "bf16":
        outline.to(torch.bfloat16)
    _check_host_memory(outline, recipe)
    device = open_device(options.device, memory)
    try:
        micro_batch = options.micro_batch or _micro_batch(outline, recipe, device, source)
        _check_micro_batch(micro_batch, recipe)
        torch.manual_seed(recipe.seed)
        model = GPT(recipe.sizes)
    except BaseException:
        device.close()
        raise
    engine = _open_engine(model, recipe, device, micro_batch, not options.no_profile)
    engine.recording = options.trace is not None
    try:
        fragments = EngineFragments(engine)
        if source.checkpoint is not None:
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
            text=source.text,
            engine=engine,
            model=model,
            micro_batch=micro_batch,
            sampler=Sampler(source.text.prepared.tokens.train, config, name),
            swarm=source.swarm,
            fragments=fragments,
        )
        _enter_swarm(session, source)
    except BaseException:
        engine.close()
        raise
    return session


def _source(options: TrainOptions, run: str, name: str, directory: Path) -> _Source:
    if options.resume:
        return _resumed(options, run, name, directory)
    if options.join:
        swarm = _join(options, run, name, directory)
        try:
            return _joined(options, swarm)
        except BaseException:
            swarm.leave()
            raise
    corpus = read_corpus(options.data)
    recipe = new_recipe(options)
    prepared = prepare(corpus, default_cache(), vocabulary=recipe.sizes.vocabulary)
    return _Source(recipe, Text(options.data, corpus.sha256, prepared))


def _resumed(options: TrainOptions, run: str, name: str, directory: Path) -> _Source:
    checkpoint = load_latest(directory / CHECKPOINTS)
    meta = checkpoint.meta
    recipe, tokenizer = recipe_of(checkpoint)
    recipe = amended(recipe, options, str(checkpoint.path))
    text = _text(options.data or meta["data"], tokenizer)
    if options.data is None and text.sha256 != meta["text_sha256"]:
        raise DataError(
            f"the text of {meta['data'] or 'the demo corpus'} is not what {checkpoint.path} was "
            "trained on; restore it, or name with --data what to go on with"
        )
    return _Source(recipe, text, checkpoint, _rejoin(options, run, name, directory, checkpoint))


def _rejoin(
    options: TrainOptions, run: str, name: str, directory: Path, checkpoint: Checkpoint
) -> Swarm | None:
    """Join through the given addresses, or look for the peers that were known when it was saved."""
    if options.join:
        return _join(options, run, name, directory)
    known = tuple(checkpoint.meta.get("swarm", {}).get("known_addresses", ()))
    if not known:
        return None
    try:
        return _join(dataclasses.replace(options, join=known), run, name, directory)
    except SwarmError as error:
        _log.warning("no peer of the run was found, going on alone: %s", error)
        return None


def _joined(options: TrainOptions, swarm: Swarm) -> _Source:
    payload: Mapping[str, Any] = swarm.manifest.payload
    recipe = amended(
        Recipe.from_json(payload["recipe"]), options, f"the run {swarm.manifest.run!r}"
    )
    tokenizer = Tokenizer.from_json(payload["tokenizer"], payload["separator"])
    return _Source(recipe, _text(options.data, tokenizer), None, swarm)


def _text(data: str | None, tokenizer: Tokenizer) -> Text:
    corpus = read_corpus(data)
    return Text(data, corpus.sha256, prepare(corpus, default_cache(), tokenizer=tokenizer))


def _join(options: TrainOptions, run: str, name: str, directory: Path) -> Swarm:
    from atomtrain.swarm import Swarm

    existed = directory.exists()
    make_directory(directory)
    try:
        return Swarm.join(swarm_config(options, run, name, directory, 1))
    except BaseException:
        if not existed:
            _remove_empty(directory)
        raise


def _remove_empty(directory: Path) -> None:
    """Remove the folder of a peer that never came to be: it holds at most a key nobody knows."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # other peers of the run live there
        directory.parent.rmdir()


def _device_memory(options: TrainOptions, recipe: Recipe) -> str | None:
    if options.device_memory is not None or recipe.model not in _SMALL_BUDGETS:
        return options.device_memory
    on_gpu = options.device.startswith("cuda") or (
        options.device == "auto" and torch.cuda.is_available()
    )
    return _SMALL_BUDGETS[recipe.model][on_gpu]


def _check_host_memory(outline: GPT, recipe: Recipe) -> None:
    """Refuse a model whose parameters, gradients and optimizer state the host cannot hold."""
    parameters = sum(parameter.numel() for parameter in outline.parameters())
    each_bytes = host_bytes_per_parameter(recipe.optimizer, recipe.precision)
    needed_bytes, there_bytes = each_bytes * parameters, host_memory_bytes()
    if needed_bytes > there_bytes:
        least_bytes = host_bytes_per_parameter(SMALLEST_STATE, recipe.precision)
        would_fit = least_bytes * parameters <= there_bytes
        raise PlanError(
            f"training {recipe.model} ({format_count(parameters)} parameters) takes "
            f"{format_bytes(needed_bytes)} of host memory, {format_bytes(there_bytes)} are there; "
            f"choose a model of at most {format_count(there_bytes // each_bytes)} parameters"
            f"{f', or --optimizer {SMALLEST_STATE}' if would_fit else ''}"
        )


def _check_micro_batch(micro_batch: int, recipe: Recipe) -> None:
    if recipe.sequences % micro_batch:
        raise ConfigError(
            f"--micro-batch {micro_batch} does not divide the {recipe.sequences} sequences of a "
            "step; give a divisor, or change --sequences"
        )


def _open_engine(
    model: GPT, recipe: Recipe, device: Device, micro_batch: int, profile: bool
) -> Engine:
    return swap(
        model,
        _example(recipe, micro_batch),
        optimizer=lambda _: make_optimizer(model, recipe),
        device=device,
        options=Options(
            micro_batches=recipe.sequences // micro_batch,
            clip_norm=recipe.clip_norm,
            precision="bf16" if recipe.precision == "bf16" else None,
            profile=profile,
        ),
    )


def _micro_batch(model: GPT, recipe: Recipe, device: Device, source: _Source) -> int:
    """Return the largest divisor of a step's sequences that fits the budget well.

    A resumed run keeps its own, because sums in another order have other last bits.
    """
    if source.checkpoint is not None:
        return int(source.checkpoint.meta["micro_batch"])
    budget_bytes = device.memory_bytes - device.reserved_bytes
    sizes = [n for n in range(recipe.sequences, 0, -1) if recipe.sequences % n == 0]
    for size in sizes:
        if size > 1 and size * recipe.context > _MOST_TOKENS_A_MICRO_BATCH:
            continue
        example = _example(recipe, size)
        traced = chain_of(model, example)
        costs = layer_costs(traced.chain, traced.bind(example))
        if fits(traced.chain, costs, budget_bytes, recipe.sequences // size):
            return size
    # None does: the planner's error says what would.
    return 1


def _example(recipe: Recipe, micro_batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (micro_batch, recipe.context)
    ids = torch.randint(recipe.sizes.vocabulary, shape, generator=generator)
    return {"input_ids": ids, "labels": ids}


def _enter_swarm(session: Session, source: _Source) -> None:
    from atomtrain.swarm import Swarm, SwarmState

    checkpoint, options = source.checkpoint, session.options
    if checkpoint is not None:
        session.step = checkpoint.step
        session.tokens = int(checkpoint.meta["tokens"])
    saved = swarm_tensors(checkpoint) if checkpoint is not None else {}
    if session.swarm is not None:
        if session.swarm.manifest.fragment_elements != session.fragments.elements:
            raise ConfigError(
                f"the run {session.run!r} divides its model otherwise than this version does; "
                "use the version of atomtrain that its founder uses"
            )
        if checkpoint is not None and saved:
            session.swarm.load_state_dict(SwarmState(saved, checkpoint.meta["swarm"]))
            session.swarm.rebase(session.fragments)
        else:
            session.swarm.download(session.fragments)
            steps = [peer.steps for peer in session.swarm.peers() if not peer.is_self]
            session.step = max([session.step, *steps])
        return
    if options.run is None and not saved:
        return
    make_directory(session.directory)
    if checkpoint is not None:
        options = with_rules(options, checkpoint.meta.get("swarm", {}).get("rules", {}))
    recipe, tokenizer = session.recipe, session.text.prepared.tokenizer
    config = swarm_config(options, session.run, session.name, session.directory, recipe.local_steps)
    manifest = manifest_of(
        session.run, recipe, tokenizer.to_json(), tokenizer.separator_text,
        session.fragments.elements,
    )  # fmt: skip
    session.swarm = Swarm.found(config, manifest, session.fragments)
    if saved and checkpoint is not None:
        session.swarm.load_state_dict(SwarmState(saved, checkpoint.meta["swarm"]))


def make_directory(directory: Path) -> None:
    """Make the folder of a peer, if it is not there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made ({error.strerror}); choose another --directory"
        ) from error


def _new_name(options: TrainOptions) -> str:
    return f"peer-{secrets.token_hex(3)}" if options.join and not options.resume else "peer-0"


def _check_directory(options: TrainOptions, directory: Path) -> None:
    checkpoints = directory / CHECKPOINTS
    if not options.resume and checkpoints.is_dir() and any(checkpoints.glob("step-*")):
        raise ConfigError(
            f"{directory} already holds a run; continue it with --run {directory.parent.name} "
            "--resume, or choose another --run name"
        )
    if options.resume and not checkpoints.is_dir():
        raise ConfigError(
            f"there is no checkpoint in {checkpoints} to resume from; check --run and --directory"
        )
