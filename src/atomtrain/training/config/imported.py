"""Recipes of axolotl and LLaMA-Factory, read as recipes of ATOM.

What has no counterpart is listed, never dropped in silence. Nothing of a file is run or fetched.
In both, rows of several data sets count once each; whoever names a set twice has its rows twice,
which here is a weight of 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atomtrain.errors import ConfigError
from atomtrain.models.lora_config import OLORA, PISSA, rounds_of
from atomtrain.training.config.imported_data import DATA_KEYS, data_of, shown
from atomtrain.training.config.other_names import (
    ADVICE,
    KIND_WORDS,
    KINDS,
    OPTIMIZERS,
    SCHEDULES,
    check_not_configuration,
    translated,
)
from atomtrain.training.config.recipe import OBJECTIVES, PREFERENCES

_PLANNED = "the plan decides this"
_NEEDLESS = {
    "adapter": "",
    "bf16_full_eval": _PLANNED,
    "deepspeed": "swapping takes its place",
    "do_train": "",
    "finetuning_type": "",
    "logging_steps": "every step is logged",
    "plot_loss": "the picture of the loss is always made",
    "flash_attention": "attention is PyTorch's own",
    "flash_attn": "attention is PyTorch's own",
    "fsdp": "swapping takes its place",
    "fsdp_config": "swapping takes its place",
    "gradient_checkpointing": _PLANNED,
    "gradient_checkpointing_kwargs": _PLANNED,
    "overwrite_cache": "",
    "overwrite_output_dir": "",
    "preprocessing_num_workers": "",
    "stage": "",
    "template": "the model's own template is used",
    "tokenizer_type": "the model's own tokenizer is used",
    "model_type": "config.json says it",
    "train_on_inputs": "the loss is on answers only",
    "trust_remote_code": "code of a model's folder is never run",
}
"""Keys that need no counterpart, and why where it is worth a word."""
_MOST_BYTES = 1 << 20
_ADAPTERS = ("lora", "qlora")
_PISSA_ROUNDS, _PISSA_EXACT = 16, -1
"""LLaMA-Factory's default, and its word for all singular values."""
_OF_LORA = {"lora_r": "r", "lora_rank": "r", "lora_alpha": "alpha"}
_SAVED = ("lora_modules_to_save", "additional_target")
"""Names of modules that are trained themselves."""
_SAME: dict[str, type] = {
    "learning_rate": float,
    "weight_decay": float,
    "warmup_steps": int,
    "warmup_ratio": float,
    "seed": int,
    "packing": bool,
    "neftune_noise_alpha": float,
}
"""Keys that are called the same here, and their types."""
_BETAS = ("rl_beta", "pref_beta", "dpo_beta", "orpo_alpha")
_NUMBERS: dict[str, type] = {
    **dict.fromkeys((*_OF_LORA, "quantization_bit", "pissa_iter"), int),
    **dict.fromkeys((*_BETAS, "simpo_gamma", "lora_dropout"), float),
}
"""Keys that become a part of something, and their types."""
_HANDLED = {
    *_SAME,
    *_NUMBERS,
    *("use_dora", "peft_use_dora", "use_rslora", "peft_use_rslora"),
    *("load_in_4bit", "load_in_8bit"),
    *("lora_target", "lora_target_modules", "lora_target_linear"),
    *("lora_target_parameters", "peft_init_lora_weights", "pissa_init"),
    *_SAVED,
    *("rl", "pref_loss", "reward_model", "output_dir"),
    *DATA_KEYS,
}
_SWITCHES = {"load_in_4bit", "load_in_8bit", "use_dora", "peft_use_dora", "use_rslora"}
KNOWN = {*KINDS, *_NEEDLESS, *_HANDLED, "optimizer"}
_OFF: tuple[Any, ...] = (False, "", "no", "none", [])
"""Values of keys that ask for nothing."""


class Imported(NamedTuple):
    """What a recipe of another tool becomes."""

    values: dict[str, Any]
    """By the names of `atom train`'s options."""
    left_out: list[str]
    """One line for each key without a counterpart."""


def imported(path: Path) -> Imported:
    """Return what a recipe of another tool says.

    Raises:
        ConfigError: it cannot be read, or says something that cannot be.
    """
    said = _read(path)
    check_not_configuration(path, said)
    if any(isinstance(value, dict) and "_component_" in value for value in said.values()):
        raise ConfigError(
            f"{path} is a recipe of torchtune, which is not understood; 'atom init' asks and "
            "writes a recipe"
        )
    if not said.keys() & KNOWN:
        raise ConfigError(
            f"{path} is not a recipe of axolotl or LLaMA-Factory: none of its keys is one of "
            "theirs; 'atom init' asks and writes a recipe"
        )
    for name in _SWITCHES & said.keys():
        if not isinstance(said[name], bool):
            raise ConfigError(
                f"{path}: {name} must be true or false, not {shown(said[name])}; correct it there"
            )
    said.update({name: _typed(path, name, said[name]) for name in _NUMBERS if name in said})
    left_out: list[str] = []
    _take_out(said, left_out)
    values = {name: _typed(path, name, said[name]) for name in _SAME if name in said}
    values.update(_adapters(path, said, left_out))
    values.update(_objective(said, left_out))
    values.update(data_of(said, left_out))
    if "output_dir" in said:
        values["directory"] = Path(str(said["output_dir"]))
    others = {}
    for name, value in said.items():
        if name in KINDS:
            others[name] = _typed(path, name, value)
        elif name in _NEEDLESS:
            left_out += [f"{name}: {_NEEDLESS[name]}"] if _NEEDLESS[name] and value else []
        elif name in ADVICE.keys() - _HANDLED:
            left_out += [] if value in _OFF else [f"{name}: {shown(value)}: {ADVICE[name]}"]
        elif name not in _HANDLED:
            left_out.append(f"{name}: {shown(value)} has no counterpart")
    return Imported({**values, **translated(others, values).values}, left_out)


def _read(path: Path) -> dict[str, Any]:
    import yaml

    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a recipe of axolotl or LLaMA-Factory in it")
    if path.parts[:1] in (("http:",), ("https:",)):
        raise ConfigError(f"{path} is an address; download the recipe, and name the file")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; name a recipe of axolotl or LLaMA-Factory")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is not a recipe: it is larger than 1 MiB")
        text = path.read_text(encoding="utf-8")
        # A few lines of aliases of aliases can stand for more than any memory holds.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ConfigError(f"{path} has aliases (*name); write out what they stand for")
        said = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, RecursionError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, ConfigError):
            raise
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"{path} is not text in UTF-8; name a recipe") from error
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path} cannot be read as YAML ({reason}); name a recipe") from error
    if not isinstance(said, Mapping):
        raise ConfigError(f"{path} is not a recipe: it has no 'key: value' lines")
    return {str(key): value for key, value in said.items() if value is not None}


def _typed(path: Path, name: str, value: Any) -> Any:
    """Return a value in its type; YAML reads `2e-4` as text."""
    kind = KINDS.get(name) or _SAME.get(name) or _NUMBERS[name]
    try:
        if (kind is bool) != isinstance(value, bool) or isinstance(value, list | Mapping):
            raise ValueError
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        if kind is int and abs(int(value)) >> 63:
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path}: {name} must be {KIND_WORDS[kind]}, not {shown(value)}; correct it there"
        ) from error


def _take_out(said: dict[str, Any], left_out: list[str]) -> None:
    """Take out what counts for nothing or has no counterpart because of its value."""
    if "optimizer" in said:  # axolotl's word for it
        said["optim"] = said.pop("optimizer")
    for name, known in (
        ("optim", OPTIMIZERS), ("lr_scheduler", SCHEDULES), ("lr_scheduler_type", SCHEDULES),
    ):  # fmt: skip
        if name in said and str(said[name]) not in known:
            value = shown(said.pop(name))
            left_out.append(f"{name}: {value} has no counterpart; known are {', '.join(known)}")
    for name in ("eval_steps", "save_steps"):
        if _is_share(said.get(name)):
            left_out.append(f"{name}: {said.pop(name)}: a part of all steps; give a number of them")
    for name, kind in {**KINDS, **_SAME}.items():
        if kind is bool and said.get(name) == "auto":  # what the machine can do is found out anyway
            del said[name]
    if said.get("max_steps") in (-1, 0):  # as many as the epochs have
        del said["max_steps"]
    for name in ("num_epochs", "num_train_epochs"):
        if name in said and "max_steps" in said:
            left_out.append(f"{name}: {shown(said.pop(name))}: max_steps counts more")
    if _is_share(said.get("warmup_steps")):
        said["warmup_ratio"] = said.pop("warmup_steps")
    if said.get("warmup_ratio") is not None and "warmup_steps" in said:
        del said["warmup_ratio" if said["warmup_steps"] else "warmup_steps"]


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _adapters(path: Path, said: Mapping[str, Any], left_out: list[str]) -> dict[str, str]:
    kind = said.get("adapter", said.get("finetuning_type"))
    if kind is None and said.keys() & {"lora_rank", "lora_target"}:
        kind = "lora"  # LLaMA-Factory's default
    if kind is None or kind == "full":
        left_out += [
            f"{name}: {shown(said[name])}: it is for adapters, and none are asked for"
            for name in ("lora_r", "load_in_4bit", "load_in_8bit", "quantization_bit")
            if said.get(name)
        ]
        return {}
    if kind not in _ADAPTERS:
        left_out.append(f"the adapter {shown(kind)} has no counterpart; ATOM has lora")
        return {}
    parts = [f"{ours}={said[name]}" for name, ours in _OF_LORA.items() if name in said]
    if "lora_rank" in said and "lora_alpha" not in said:  # LLaMA-Factory's default
        parts.append(f"alpha={2 * said['lora_rank']}")
    named = "lora_target_modules" if "lora_target_modules" in said else "lora_target"
    targets = _names(path, named, said.get(named))
    if said.get("lora_target_linear") or targets in (["all"], ["all-linear"]):
        targets = []  # all of them is what is done anyway
    # Of experts, such as `mlp.experts.down_proj`; here the last name is enough.
    experts = _names(path, "lora_target_parameters", said.get("lora_target_parameters"))
    if experts:
        targets = [*(targets or ["all-linear"]), *(name.rpartition(".")[2] for name in experts)]
    saved = [name for key in _SAVED for name in _names(path, key, said.get(key))]
    for part, names in (("targets", targets), ("modules_to_save", saved)):
        parts += [f"{part}={'+'.join(names)}"] if names else []
    dora = bool(said.get("use_dora") or said.get("peft_use_dora"))
    if dora:
        parts.append("dora=true")
    if said.get("use_rslora") or said.get("peft_use_rslora"):
        parts.append("rslora=true")
    if init := _init_of(said, left_out):
        parts.append(f"init={init}")
    bits = said.get("quantization_bit") or (8 if said.get("load_in_8bit") else None)
    if said.get("load_in_4bit") or (kind == "qlora" and bits is None):
        bits = 4
    if bits:
        parts.append(f"bits={bits}")
    if said.get("lora_dropout") and dora:
        left_out.append(f"lora_dropout: {said['lora_dropout']}: DoRA has no dropout here")
    elif said.get("lora_dropout"):
        parts.append(f"dropout={said['lora_dropout']}")
    return {"lora": ",".join(parts) or "r=8"}


def _names(path: Path, key: str, given: Any) -> list[str]:
    """Return names that stand in a list, or in a text with commas between them."""
    if isinstance(given, str):
        given = given.split(",")
    if not isinstance(given or [], list):
        raise ConfigError(f"{path}: {key} must be a list of names, not {shown(given)}; correct it")
    return [str(name).strip() for name in given or []]


def _init_of(said: Mapping[str, Any], left_out: list[str]) -> str | None:
    """Return how adapters begin, if not at nothing: in axolotl's words, or in LLaMA-Factory's."""
    if said.get("pissa_init"):
        rounds = said.get("pissa_iter", _PISSA_ROUNDS)
        return PISSA if rounds == _PISSA_EXACT else f"{PISSA}_niter_{rounds}"
    asked = said.get("peft_init_lora_weights") or True  # axolotl passes over false
    if asked in (True, "gaussian"):
        return None
    if asked not in (PISSA, OLORA) and rounds_of(str(asked)) is None:
        left_out.append(f"peft_init_lora_weights: {shown(asked)} has no counterpart")
        return None
    return str(asked)


def _objective(said: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    kind = said.get("rl", "rm" if said.get("reward_model") is True else said.get("stage", "sft"))
    if kind in ("sft", "pt"):
        return {}
    if kind == "dpo":
        loss = said.get("pref_loss", "sigmoid")
        kind = "dpo" if loss == "sigmoid" else loss
    if kind == "rm":
        return {"objective": "reward"}
    if kind not in PREFERENCES:
        left_out.append(
            f"the objective {shown(kind)} has no counterpart; ATOM has {', '.join(OBJECTIVES)}"
        )
        return {}
    beta = next((said[name] for name in _BETAS if name in said), None)
    gamma = said.get("simpo_gamma") if kind == "simpo" else None
    numbers = {"beta": beta, "gamma": gamma}
    return {"objective": kind, **{k: v for k, v in numbers.items() if v is not None}}
