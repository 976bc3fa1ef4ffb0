"""What the model says of pairs of answers before it learns from them; computed once, and kept.

The engine evaluates the untouched model; adapters that lie beside it change nothing yet. So a
reference needs no second copy of the model, and the model may be larger than the device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atomtrain.data.material import PairMaterial, PairRows, References
from atomtrain.errors import ConfigError
from atomtrain.files import replacing
from atomtrain.models.lora_config import NOTHING
from atomtrain.progress import Progress
from atomtrain.training.config.preflight import make_directory
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.objective import rows_heard
from atomtrain.training.setup.objectives import DirectPreference
from atomtrain.training.setup.texts import Text

if TYPE_CHECKING:
    from atomtrain.engine.engine import Engine

REFERENCES_FILE = "references.safetensors"
_KEY = "key"


def with_references(
    text: Text,
    engine: Engine,
    objective: DirectPreference,
    micro_batch: int,
    recipe: Recipe,
    directory: Path,
) -> Text:
    """Return pairs with what the engine's model says of them now; read from `directory` if there.

    Args:
        text: Pairs.
        engine: Its model is as it was before it learnt from any pair.
        objective: The engine's.
        micro_batch: Sequences of a micro-batch, as those of the engine's example.
        recipe: What decides the pairs' rows.
        directory: The peer's folder; gets `REFERENCES_FILE`, made if missing.

    Raises:
        ConfigError: the file cannot be written.
    """
    *sources, validation = (*text.material.sources, text.material.validation)
    pairs = [each for each in (*sources, validation) if isinstance(each, PairMaterial)]
    parts = [material.parts(recipe.context) for material in pairs]
    file, key = directory / REFERENCES_FILE, _key(text, recipe)
    found = _read(file, key)
    if found is None:
        total = sum(len(part) for both in parts for part in both if part is not None)
        what = "asking the model about the answers before it learns"
        with Progress(what, total, "pairs") as progress:
            asked = _Asked(engine, objective, micro_batch, progress)
            found = [References(*(asked.of(part) for part in both)) for both in parts]
        _write(file, key, found)
    known = [each._replace(references=of) for each, of in zip(pairs, found, strict=True)]
    judged = None if validation is None else known[-1]
    material = text.material._replace(sources=tuple(known[: len(sources)]), validation=judged)
    return text._replace(material=material)


class _Asked:
    """Asks the engine's model what it says of pairs, and tells how far it is."""

    def __init__(
        self, engine: Engine, objective: DirectPreference, micro_batch: int, progress: Progress
    ) -> None:
        self._engine, self._objective, self._micro_batch = engine, objective, micro_batch
        self._progress = progress

    def of(self, rows: PairRows | None) -> NDArray[np.float32]:
        """Return `[2 * pairs]`: the sum of the logarithms of each answer's probabilities."""
        if rows is None:
            return np.empty(0, np.float32)
        values = np.empty(2 * len(rows), np.float32)
        # As many as the plan takes at once: each evaluation brings all parameters to the device.
        size = self._micro_batch * self._engine.plan.micro_batches // 2
        for first in range(0, len(rows), size):
            batch = rows.batch([index % len(rows) for index in range(first, first + size)])
            with self._objective.listening() as heard:
                self._engine.evaluate(self._objective.micro_batches(batch, self._micro_batch))
            count = min(size, len(rows) - first)
            values[2 * first : 2 * (first + count)] = rows_heard(heard).numpy()[: 2 * count]
            self._progress.advance(count)
        return values


def _key(text: Text, recipe: Recipe) -> str:
    """Return what tells these pairs and this model from others."""
    bits: int | str | None = None if recipe.lora is None else recipe.lora.bits
    if recipe.lora is not None and recipe.lora.published is not None:
        bits = f"{recipe.lora.published} in {bits}"
    said = [text.sha256, recipe.context, recipe.model, recipe.precision, bits]
    if recipe.lora is not None and recipe.lora.init != NOTHING:  # what is left is rounded otherwise
        said += [dataclasses.asdict(recipe.lora), recipe.seed]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _read(file: Path, key: str) -> list[References] | None:
    """Return what the file has of each source, `None` if it is not there, damaged or of others."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as stored:
            if (stored.metadata() or {}).get(_KEY) != key:
                return None
            count = len(stored.keys()) // len(References._fields)
            return [
                References(*(stored.get_tensor(f"{index}.{name}") for name in References._fields))
                for index in range(count)
            ]
    except (OSError, SafetensorError):
        return None


def _write(file: Path, key: str, references: Sequence[References]) -> None:
    from safetensors.numpy import save_file

    make_directory(file.parent)
    try:
        with replacing(file) as temporary:
            tensors = {
                f"{index}.{name}": values
                for index, one in enumerate(references)
                for name, values in one._asdict().items()
            }
            save_file(tensors, temporary, metadata={_KEY: key})
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written ({error.strerror}); choose another --directory"
        ) from error
