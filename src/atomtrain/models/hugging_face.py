"""Models of Hugging Face that read texts (and images): found, described, built without weights.

What decides the model is the content of its `config.json`. It travels with a run, so that peers
that join and runs that are resumed need no folder.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.front import FREE_SHAPES
from atomtrain.errors import AnalysisError, AtomError, ConfigError, DataError, nearest
from atomtrain.files import read_small
from atomtrain.models.confined import (
    check_made,
    check_names,
    checked_config,
    confined,
    numbers_of,
    parts_within,
    quantisation_of,
)
from atomtrain.models.gpt_config import CONFIG_FILE, PRESETS, check_place
from atomtrain.models.heads import check_head, is_classifier, is_embedder, labels_of
from atomtrain.models.image_text import (
    KINDS,
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    VIDEO_FILE,
    kind_of,
    needs_images,
    reads_images,
)
from atomtrain.models.weights.files import files_of

LEAST_TRANSFORMERS = (5, 8)
CARRIED_FILES = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    PROCESSOR_FILE,
    PREPROCESSOR_FILE,
    VIDEO_FILE,
)
"""Small files that belong to the model and that an export must have again."""
_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = ("model.safetensors", "model-*.safetensors")
"""Not all of a repository's safetensors files: some hold the same weights in another form too."""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
_USUAL_WIDTH = 1024
"""Where a configuration tells no width: it only decides the default learning rate."""
_LONGEST_REASON = 200
_TORCHVISION = "its processor needs torchvision"
_WHY = {
    **dict.fromkeys(["cohere2_vision", "lfm2_vl"], f" ({_TORCHVISION})"),
    "llama4": f" ({_TORCHVISION}, and its own forward fails in transformers 5.24)",
    "mllama": " (its processor makes masks of which images each token sees)",
    "paligemma": " (its processor writes texts anew)",
}
"""Why kinds of models that read images are not among those that are trained."""
_MOST_PARTS = 1 << 16
"""Modules of a model; those of the largest have some thousands."""
_MOST_NUMBER = 1 << 31


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """What a model of Hugging Face is, without its weights: a causal one, or a classifier, or one
    that reads images beside text."""

    config: dict[str, Any]
    """Content of `config.json`."""
    vocabulary: int
    """Rows of the embedding; the tokenizer has at most as many tokens."""
    context: int | None
    """Tokens of the longest sequence that the model was made for, if it says so."""
    width: int
    """Size of the hidden state."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts of the `CARRIED_FILES` that there are, by name."""
    dropout: None = None
    """Set in `config.json`, under names of the architecture's own."""

    @property
    def labels(self) -> list[str] | None:
        """What a classifier tells apart; of a reward model one; `None` of a language model."""
        return labels_of(self.config)

    @property
    def embeds(self) -> bool:
        """Whether it has no head, and says what hidden states are."""
        return is_embedder(self.config)

    @property
    def reads_images(self) -> bool:
        return reads_images(self.config)

    @property
    def needs_images(self) -> bool:
        """Whether it learns from no texts without images."""
        return needs_images(self.config)

    @property
    def router_share(self) -> float:
        """What the loss of a mixture's routers counts, if `output_router_logits` has it told."""
        inner = self.config.get("text_config") or self.config
        share = inner.get("router_aux_loss_coef", self.config.get("router_aux_loss_coef", 0.0))
        return float(share) if isinstance(share, int | float) else 0.0

    def __post_init__(self) -> None:
        """Keep of the configuration what may decide a model: it may come from a founder.

        Raises:
            ConfigError: it asks for more than that, or something in it cannot be.
        """
        if not isinstance(self.config, dict) or not isinstance(self.files, dict):
            raise ConfigError("a model's configuration and its files must be JSON objects")
        object.__setattr__(self, "config", checked_config(self.config, "the configuration"))
        labels_of(self.config)
        for name in ("vocabulary", "width", *(() if self.context is None else ("context",))):
            number = getattr(self, name)
            if not isinstance(number, int) or not 1 <= number <= _MOST_NUMBER:
                raise ConfigError(
                    f"the model's {name} must be a whole number from 1 to {_MOST_NUMBER}, not "
                    f"{str(number)[:40]}"
                )
        for name, text in self.files.items():
            if name not in CARRIED_FILES or not isinstance(text, str):
                raise ConfigError(
                    f"the model carries a file {name!r}; only {', '.join(CARRIED_FILES)} are taken"
                )


def is_hugging_face(name: str) -> bool:
    """Return whether a user's name of a model means a folder, a file or an id, and no preset."""
    path = Path(name)
    return name not in PRESETS and (path.exists() or path.suffix == ".json" or "/" in name)


def model_folder(name: str, *, weights: bool = True) -> Path:
    """Return the folder of a model: a path, or an id such as `org/name` in the local cache.

    An id that is not there is downloaded, unless `HF_HUB_OFFLINE` is set.

    Args:
        weights: Whether they are needed; else of an id only what describes the model is.

    Raises:
        ConfigError: there is no such folder or model.
    """
    path = Path(name).expanduser()
    check_place(name)
    return path if path.is_dir() else _from_hub(name, weights)


def _from_hub(name: str, weights: bool) -> Path:
    require_transformers(f"the model {name}")
    from huggingface_hub import snapshot_download

    from atomtrain.models.hub_reach import not_found, out_of_reach

    patterns = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
    missing = reason = ""
    for offline in (True, False):
        if not offline and (reason := out_of_reach()):
            break
        try:
            found = Path(snapshot_download(name, local_files_only=offline, allow_patterns=patterns))
        except Exception as error:  # noqa: BLE001 (of several libraries, down to sockets)
            reason = "" if offline else f"the hub says: {_one_line(error.__cause__ or error)}"
            continue
        # A download that was interrupted left some of its files.
        missing = _missing(found, weights)
        if not missing:
            return found
    lacks = f"what is in the local cache of Hugging Face is not whole ({missing})"
    raise not_found(name, reason, missing and lacks)


def _missing(folder: Path, weights: bool) -> str:
    if not (folder / CONFIG_FILE).is_file():
        return f"no {CONFIG_FILE}"
    if weights:
        try:
            files_of(folder)
        except DataError as error:
            return str(error)
    return ""


def read_config(source: Path) -> HuggingFaceConfig:
    """Return what a model's folder (or its `config.json` alone) says about it.

    Raises:
        ConfigError: it cannot be read, or is of no known architecture.
    """
    file = source / CONFIG_FILE if source.is_dir() else source
    stored = checked_config(_read_json(file), str(file))
    require_transformers(str(file))
    files = {}
    for name in CARRIED_FILES:
        path = file.parent / name
        if source.is_dir():
            with contextlib.suppress(FileNotFoundError):
                files[name] = _read(path)
    auto = _auto_config(stored, str(file))
    text = auto.get_text_config()
    vocabulary = _first_number(text, ("vocab_size",))
    if vocabulary is None:
        raise ConfigError(f"{file} does not say vocab_size; add the number of tokens")
    return HuggingFaceConfig(
        config=stored,
        vocabulary=vocabulary,
        context=_first_number(text, _CONTEXT_KEYS),
        width=_first_number(text, _WIDTH_KEYS) or _USUAL_WIDTH,
        files=files,
    )


def read_quantisation(source: Path) -> dict[str, Any] | None:
    """Return what a model's folder (or its `config.json` alone) says of how its weights were
    quantised; `None` if they are wide.

    Raises:
        ConfigError: it cannot be read, or the method is not known.
    """
    file = source / CONFIG_FILE if source.is_dir() else source
    stored = _read_json(file)
    return quantisation_of(stored, str(file)) or quantisation_of(
        stored.get("text_config"), str(file)
    )


def build(
    sizes: HuggingFaceConfig, what: str = "the configuration", *, as_stored: bool = False
) -> nn.Module:
    """Return the model with memory that nobody has touched in place of its weights.

    Those are float32, or, with `as_stored`, of the type that the configuration names.

    Buffers are as the model makes them. On the meta device (`with torch.device("meta")`) it has no
    memory at all. Untouched memory of a large tensor costs address space only, until it is written.

    Raises:
        ConfigError: transformers is missing.
        AnalysisError: the configuration cannot be made a model.
    """
    require_transformers(what)
    config = without_cache(_auto_config(sizes.config, what))
    on_meta = torch.get_default_device().type == "meta"
    make = _maker_of(sizes)
    dtype = config.dtype if as_stored else torch.float32
    with _making(what), nullcontext() if on_meta else _weights_on_meta():
        model: nn.Module = make(config, dtype=dtype, trust_remote_code=False)
    check_head(model, what)
    if (kind := kind_of(model)) is not None and not kind.alike:
        setattr(model, FREE_SHAPES, ("pixel_values",))
    if not on_meta:
        _give_memory(model)
    return model.train()


def build_random(sizes: HuggingFaceConfig, what: str = "the configuration") -> nn.Module:
    """Return the model with random float32 weights, as its class begins, to be evaluated.

    Experts are computed one by one: the other ways ask for widths that not every model has.

    Raises:
        AnalysisError: the configuration cannot be made a model.
    """
    config = without_cache(_auto_config(sizes.config, what))
    config._experts_implementation = "eager"
    make = _maker_of(sizes)
    with _making(what):
        model: nn.Module = make(config, dtype=torch.float32)
    return model.eval()


def without_cache(config: Any) -> Any:
    """Return the configuration for training: keys and values of the past are not kept.

    Nor are weights divided for evaluation (RWKV, for numbers of 16 bits): that changes them.
    """
    for part in (config, config.get_text_config()):  # the language model asks its own part
        part.use_cache = False
        if hasattr(part, "rescale_every"):
            part.rescale_every = 0
    return config


def _maker_of(sizes: HuggingFaceConfig) -> Any:
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    if sizes.reads_images:
        return AutoModelForImageTextToText.from_config
    if is_classifier(sizes.config):
        return AutoModelForSequenceClassification.from_config
    if sizes.embeds:
        return AutoModel.from_config
    return AutoModelForCausalLM.from_config


def _auto_config(stored: dict[str, Any], what: str) -> Any:
    from transformers import AutoConfig

    _check_kind(stored.get("model_type"), what)
    check_names(stored, what)
    with _making(what):
        made = AutoConfig.for_model(**numbers_of(copy.deepcopy(stored)))
    check_made(made, what)
    return made


def _check_kind(kind: object, what: str) -> None:
    if not isinstance(kind, str):
        raise ConfigError(
            f"{what} has no model_type, so it is no Hugging Face configuration; give the "
            f"config.json of a causal language model, or one of {', '.join(PRESETS)}"
        )
    known = [*_causal_kinds(), *KINDS]
    # Of some kinds the language model alone is known as a causal one, under another kind.
    if kind in _WHY or (kind not in known and kind in _image_kinds()):
        raise ConfigError(
            f"{what} describes a model of type {kind!r}, which reads images and is not trained here"
            f"{_WHY.get(kind, '')}; of such models these are: {', '.join(KINDS)}"
        )
    if kind not in known:
        raise ConfigError(
            f"{what} describes a model of type {kind!r}, which is not a causal language model that "
            f"the installed transformers knows.{nearest(kind, known)} Give another configuration"
        )


@contextmanager
def _making(what: str) -> Iterator[None]:
    try:
        with confined(), parts_within(_MOST_PARTS, what):
            yield
    except AtomError:
        raise
    except Exception as error:  # a class of transformers may raise anything
        raise AnalysisError(
            f"{what} cannot be made a model ({type(error).__name__}: {_one_line(error)}); check "
            "its values"
        ) from error


def check_context(name: str, context: int, longest: int | None) -> None:
    """Refuse sequences that are longer than the model's (`None` does not say).

    Raises:
        ConfigError: they are.
    """
    if longest is not None and context > longest:
        raise ConfigError(
            f"{name} takes at most {longest} tokens a sequence, not {context}; choose a smaller "
            "--context"
        )


def require_transformers(
    what: str, least: tuple[int, int] = LEAST_TRANSFORMERS, extra: str = "hf"
) -> None:
    """Refuse to go on without the package that Hugging Face models need.

    Raises:
        ConfigError: it is not installed, or too old; names the extra.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"reading {what} needs the package transformers; install it with "
            f"pip install 'atomtrain[{extra}]'"
        ) from None
    found = transformers.__version__
    if tuple(map(int, found.split(".")[:2])) < least:
        raise ConfigError(
            f"reading {what} needs transformers {'.'.join(map(str, least))} or newer, not {found}; "
            f"run pip install --upgrade 'atomtrain[{extra}]'"
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when its module takes it; buffers stay."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _give_memory(model: nn.Module) -> None:
    """Replace parameters on the meta device by ones in memory; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                data: Tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                made[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def _read(file: Path) -> str:
    try:
        return read_small(file)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read ({error}); restore it") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        stored = json.loads(_read(file))
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{file} is nested too deep; give a Hugging Face config.json") from None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}).{nearest(str(file), PRESETS)} Models: "
            f"{', '.join(PRESETS)}, or the path of a Hugging Face config.json"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{file} is not JSON ({error}); give the config.json of a Hugging Face model"
        ) from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{file} is not a JSON object; give a Hugging Face config.json")
    return stored


def _causal_kinds() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _image_kinds() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def _first_number(config: Any, keys: tuple[str, ...]) -> int | None:
    values = (getattr(config, key, None) for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_LONGEST_REASON]
