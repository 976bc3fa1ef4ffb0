"""What a peer starts from: a new recipe, a checkpoint, or a swarm that it joins."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomtrain.checkpoint import Checkpoint, load_latest
from atomtrain.data.sampler import SamplerConfig
from atomtrain.data.tokenizer import Tokenizer, read_tokenizer
from atomtrain.data.weighted import check_apart
from atomtrain.errors import AtomError, ConfigError, DataError, SwarmError
from atomtrain.models.heads import with_head, without_head
from atomtrain.models.hugging_face import HuggingFaceConfig, model_folder, read_quantisation
from atomtrain.progress import Progress
from atomtrain.settings import MOST_COUNT
from atomtrain.swarm.packages import missing_packages, require_swarm
from atomtrain.training.config.new_recipe import amended, new_recipe
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.preflight import CHECKPOINTS, make_directory, remove_empty
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.loading import Weights
from atomtrain.training.setup.peering import check_rules, knows_peers, swarm_config
from atomtrain.training.setup.state import data_of, plan_before, recipe_of
from atomtrain.training.setup.texts import Text, read_labels, read_text

if TYPE_CHECKING:
    from atomtrain.swarm import Swarm

_log = logging.getLogger("atomtrain.training")


@dataclass(frozen=True)
class Source:
    """What a peer starts from."""

    recipe: Recipe
    text: Text
    checkpoint: Checkpoint | None = None
    swarm: Swarm | None = None
    weights: Weights | None = None
    """Those of a Hugging Face model: to begin with, or frozen."""
    plan: Mapping[str, Any] | None = None
    """By which the checkpoint was trained."""


def find_source(options: TrainOptions, run: str, name: str, directory: Path) -> Source:
    """Return what the options say that a peer starts from.

    Raises:
        AtomError: any mistake in options, data, checkpoint or address.
    """
    if options.resume:
        return _resumed(options, run, name, directory)
    if options.join:
        swarm = _join(options, run, name, directory)
        try:
            return _joined(options, swarm)
        except BaseException:
            swarm.leave()
            raise
    recipe = new_recipe(options)
    if isinstance(recipe.sizes, HuggingFaceConfig):
        source = _from_folder(options, recipe)
    else:
        source = Source(recipe, _text(options.data, options.validation, recipe, None))
    if options.epochs is None:
        return source
    steps = _steps_of(options.epochs, source, name)
    recipe = new_recipe(dataclasses.replace(options, epochs=None, steps=steps))
    recipe = dataclasses.replace(recipe, sizes=source.recipe.sizes)  # with labels
    return dataclasses.replace(source, recipe=recipe)


def _steps_of(epochs: float, source: Source, name: str) -> int:
    """Return the steps in which a peer sees its data so many times."""
    recipe = source.recipe
    config = SamplerConfig(
        context_tokens=recipe.context, sequences=recipe.sequences, seed=recipe.seed
    )
    steps = math.ceil(epochs / source.text.material.sampler(config, name).epoch(1))
    if steps > MOST_COUNT:
        raise ConfigError(f"--epochs {epochs:g} would be {steps} steps; give fewer")
    return steps


def _from_folder(options: TrainOptions, recipe: Recipe) -> Source:
    """Return a new run of a Hugging Face model, with its own tokenizer and weights."""
    assert options.model is not None
    assert isinstance(recipe.sizes, HuggingFaceConfig)
    folder = model_folder(options.model)
    tokenizer = read_tokenizer(folder)
    sizes = recipe.sizes
    tokenizer.check_room(sizes.vocabulary, str(folder))
    if recipe.has_head:
        recipe = _with_head(recipe, sizes, options.data, tokenizer.separator)
    elif recipe.objective == "embed":
        headless = dataclasses.replace(sizes, config=without_head(sizes.config))
        recipe = dataclasses.replace(recipe, sizes=headless)
    weights = _weights_in(folder, recipe)
    text = _text(options.data, options.validation, recipe, tokenizer)
    return Source(recipe, text, weights=weights)


def _with_head(
    recipe: Recipe, sizes: HuggingFaceConfig, data: Sequence[str], separator: int
) -> Recipe:
    """Return the recipe of a model whose head has the labels that it had, or those of the data."""
    labels = sizes.labels
    if labels is None and recipe.objective == "classify":
        labels = read_labels(data)
    config = with_head(sizes.config, labels, separator)
    return dataclasses.replace(recipe, sizes=dataclasses.replace(sizes, config=config))


def _text(
    data: Sequence[str], validation: str | None, recipe: Recipe, tokenizer: Tokenizer | None
) -> Text:
    return read_text(
        data, recipe.sizes, tokenizer, packed=recipe.packed, learns=recipe.learns,
        validation=validation,
    )  # fmt: skip


def _weights_in(folder: Path, recipe: Recipe) -> Weights:
    assert isinstance(recipe.sizes, HuggingFaceConfig)
    return Weights(folder, recipe.sizes, recipe.seed)


def _base_of(
    recipe: Recipe, given: str | None, known: str | None, *, joins: bool = False
) -> Weights | None:
    """Return the weights that a run began with, if it still needs them.

    Adapters lie beside them, and what is preferred is compared with what they prefer. Who `joins`
    gets nothing from others that is not trained: a checkpoint has what looks at images.

    Raises:
        ConfigError: the folder is not there, or was not named.
    """
    frozen = recipe.lora is not None or (joins and recipe.reads_images and not recipe.train_tower)
    if not frozen and not recipe.has_reference:
        return None
    if given is None and known is None:
        what = "adapters of" if recipe.lora is not None else "the preferences of"
        what = what if recipe.lora is not None or recipe.has_reference else "the language part of"
        raise ConfigError(
            f"the run trains {what} {recipe.model}; name the folder of that model with --model"
        )
    if given is None and not Path(str(known)).is_dir():  # a checkpoint's word is not an id of a hub
        raise ConfigError(
            f"the run began with the model in {known}, which is not there any more; put it there "
            "again, or name its folder with --model"
        )
    folder = model_folder(given or str(known))
    if recipe.lora is not None and recipe.lora.published is not None:
        here = recipe.lora.published_as(read_quantisation(folder)).published
        if here != recipe.lora.published:
            _log.warning(
                "the run keeps numbers that its model was published in (%s), and %s has others "
                "(%s): the frozen model is rounded otherwise here than it was; give --model the "
                "folder that the run began with",
                *(recipe.lora.published, folder, here or "wide ones"),
            )
    return _weights_in(folder, recipe)


def _resumed(options: TrainOptions, run: str, name: str, directory: Path) -> Source:
    checkpoint = load_latest(directory / CHECKPOINTS)
    meta = checkpoint.meta
    if meta.get("swarm"):
        require_swarm("--resume of a run that others may join")
    _check_guards(options, run, meta.get("guards", []))
    recipe, tokenizer = recipe_of(checkpoint)
    recipe = amended(recipe, options, str(checkpoint.path))
    data, validation = data_of(checkpoint)
    plan = plan_before(checkpoint)
    validation = options.validation or validation
    named = options.data or options.validation
    if named:
        check_apart(options.data or data, validation)
    text = _text(options.data or data, validation, recipe, tokenizer)
    if not named and text.sha256 != meta["text_sha256"]:
        raise DataError(
            f"the text of {text.named} is not what {checkpoint.path} was "
            "trained on; restore it, or name with --data what to go on with"
        )
    weights = _base_of(recipe, options.model, meta.get("model_folder"))
    swarm = _rejoin(options, run, name, directory, checkpoint)
    return Source(recipe, text, checkpoint, swarm, weights, plan)


def guards_of(options: TrainOptions) -> list[str]:
    """Return the options that keep strangers out of the run."""
    guards = {"--run-key": options.run_key, "--allow": options.allow}
    return [flag for flag, path in guards.items() if path is not None]


def _check_guards(options: TrainOptions, run: str, before: list[str]) -> None:
    """Refuse to open a run that was closed to strangers only because an option was forgotten."""
    if before and not guards_of(options):
        again = " and ".join(f"{flag} FILE" for flag in before)
        raise ConfigError(
            f"run {run!r} was closed to strangers; give {again} again, or anybody could join it"
        )


def _rejoin(
    options: TrainOptions, run: str, name: str, directory: Path, checkpoint: Checkpoint
) -> Swarm | None:
    """Join through the given addresses, or look for the peers that were known when it was saved."""
    if options.join:
        return _join(options, run, name, directory)
    if missing_packages():  # nobody was met
        return None
    known = tuple(checkpoint.meta.get("swarm", {}).get("known_addresses", ()))
    if not known and not knows_peers(run, directory.parent):
        return None
    from atomtrain.swarm.catchup.joining import WrongKeyError

    try:
        return _join(dataclasses.replace(options, join=known), run, name, directory)
    except SwarmError as error:
        if isinstance(error, WrongKeyError) and options.run_key is not None:
            raise  # the others are there: alone it would be another run of the same name
        _log.warning("no peer of the run was found, going on alone: %s", error)
        return None


@contextmanager
def _as_founder_says(run: str) -> Iterator[None]:
    """Tell whose mistake it is."""
    try:
        yield
    except (AtomError, KeyError, TypeError) as error:
        raise SwarmError(f"what the founder of run {run!r} says cannot be used: {error}") from error


def _joined(options: TrainOptions, swarm: Swarm) -> Source:
    payload, run = swarm.manifest.payload, swarm.manifest.run
    with _as_founder_says(run):
        said = Recipe.from_json(payload["recipe"])
    recipe = amended(said, options, f"the run {run!r}", joins=True)
    with _as_founder_says(run):
        tokenizer = Tokenizer.from_json(payload["tokenizer"], payload["separator"])
        tokenizer.check_room(recipe.sizes.vocabulary, "the manifest")
    weights = _base_of(recipe, options.model, None, joins=True)
    text = _text(options.data, options.validation, recipe, tokenizer)
    return Source(recipe, text, None, swarm, weights)


def _join(options: TrainOptions, run: str, name: str, directory: Path) -> Swarm:
    from atomtrain.swarm import Swarm

    existed = directory.exists()
    make_directory(directory)
    try:
        with Progress(f"joining {run}"):
            swarm = Swarm.join(swarm_config(options, run, name, directory, 1))
        try:
            check_rules(options, swarm.manifest.rules, run)
        except ConfigError:
            swarm.leave()
            raise
        return swarm
    except BaseException:
        if not existed:
            remove_empty(directory)
        raise


def averages_gradients(options: TrainOptions, source: Source) -> bool:
    """Say whether the run averages gradients: as its swarm does, or did, or as is asked for.

    Raises:
        ConfigError: with that optimizer or precision it cannot.
    """
    if source.swarm is not None:
        average = source.swarm.manifest.rules.average
    else:
        saved = {} if source.checkpoint is None else source.checkpoint.meta.get("swarm", {})
        average = options.average or saved.get("rules", {}).get("average", "local")
    if average != "gradient":
        return False
    recipe = source.recipe
    if recipe.optimizer != "adamw" or recipe.precision != "fp32":
        raise ConfigError(
            "gradients are averaged for AdamW in float32, not for optimizer "
            f"{recipe.optimizer!r} with precision {recipe.precision!r}; leave --optimizer and "
            "--precision out, or --average"
        )
    if recipe.layer_lr_decay != 1:
        raise ConfigError(
            f"gradients are averaged with one learning rate for all layers, not with "
            f"--layer-lr-decay {recipe.layer_lr_decay:g}; leave it out, or --average"
        )
    return True
