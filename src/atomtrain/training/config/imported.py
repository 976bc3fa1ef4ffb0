"""Recipes of axolotl and LLaMA-Factory, read as recipes of ATOM.

What has no counterpart is listed, never dropped in silence. Nothing of a file is run or fetched.
In both, rows of several data sets count once each; whoever names a set twice has its rows twice,
which here is a weight of 2.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atomtrain.errors import ConfigError
from atomtrain.models.lora_config import OLORA, PISSA, rounds_of
from atomtrain.training.config.other_names import KINDS, translated
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
_SAME: dict[str, type] = {
    "learning_rate": float,
    "weight_decay": float,
    "warmup_steps": int,
    "seed": int,
    "packing": bool,
    "neftune_noise_alpha": float,
}
"""Keys that are called the same here, and their types."""
_BETAS = ("rl_beta", "pref_beta", "dpo_beta", "orpo_alpha")
_DATA_KEYS = (
    "datasets", "test_datasets", "dataset", "eval_dataset", "dataset_dir", "val_set_size",
    "val_size", "mix_strategy", "interleave_probs",
)  # fmt: skip
"""Keys that are understood or told here."""
_HANDLED = {
    *_SAME,
    *_OF_LORA,
    *("use_dora", "peft_use_dora", "use_rslora", "peft_use_rslora"),
    *("load_in_4bit", "load_in_8bit", "quantization_bit"),
    *("lora_target", "lora_target_modules", "lora_target_linear", "lora_dropout"),
    *("lora_target_parameters", "peft_init_lora_weights", "pissa_init", "pissa_iter"),
    *("rl", "pref_loss", "simpo_gamma", "output_dir"),
    *_DATA_KEYS,
    *_BETAS,
}


_SWITCHES = {"load_in_4bit", "load_in_8bit", "use_dora", "peft_use_dora", "use_rslora"}
_KNOWN = {*KINDS, *_NEEDLESS, *_HANDLED, "optimizer"}


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
    if not said.keys() & _KNOWN:
        raise ConfigError(
            f"{path} is not a recipe of axolotl or LLaMA-Factory: none of its keys is one of "
            "theirs; 'atom init' asks and writes a recipe"
        )
    for name in _SWITCHES & said.keys():
        if not isinstance(said[name], bool):
            raise ConfigError(
                f"{path}: {name} must be true or false, not {said[name]!r}; correct it there"
            )
    left_out: list[str] = []
    values = {name: _typed(path, name, said[name]) for name in _SAME if name in said}
    values.update(_adapters(said, left_out))
    values.update(_objective(said, left_out))
    values.update(data_of(said, left_out))
    if "output_dir" in said:
        values["directory"] = Path(str(said["output_dir"]))
    if "warmup_ratio" in said and "max_steps" not in said:
        left_out.append("warmup_ratio: a part of steps that nobody knows yet; see --warmup-steps")
        del said["warmup_ratio"]
    if "optimizer" in said:  # axolotl's word for it
        said["optim"] = said.pop("optimizer")
    others = {}
    for name, value in said.items():
        if name in KINDS:
            others[name] = _typed(path, name, value)
        elif name in _NEEDLESS:
            left_out += [f"{name}: {_NEEDLESS[name]}"] if _NEEDLESS[name] and value else []
        elif name not in _HANDLED:
            left_out.append(f"{name}: {value!r} has no counterpart")
    return Imported({**values, **translated(others, values).values}, left_out)


def _read(path: Path) -> dict[str, Any]:
    import yaml

    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a recipe of axolotl or LLaMA-Factory in it")
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
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{path} cannot be read as YAML ({reason}); name a recipe") from error
    if not isinstance(said, Mapping):
        raise ConfigError(f"{path} is not a recipe: it has no 'key: value' lines")
    return {str(key): value for key, value in said.items() if value is not None}


def _typed(path: Path, name: str, value: Any) -> Any:
    """Return a value in its type; YAML reads `2e-4` as text."""
    kind = KINDS.get(name) or _SAME[name]
    if kind is bool and value == "auto":
        return False  # what the machine can do is found out anyway
    try:
        if (kind is bool) != isinstance(value, bool):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {name} must be of type {kind.__name__}, not {value!r}; correct it there"
        ) from error


def _adapters(said: Mapping[str, Any], left_out: list[str]) -> dict[str, str]:
    kind = said.get("adapter", said.get("finetuning_type"))
    if kind is None or kind == "full":
        return {}
    if kind not in _ADAPTERS:
        left_out.append(f"the adapter {kind!r} has no counterpart; ATOM has lora")
        return {}
    parts = [f"{ours}={said[name]}" for name, ours in _OF_LORA.items() if name in said]
    targets = said.get("lora_target_modules", said.get("lora_target"))
    if said.get("lora_target_linear") or targets in ("all", "all-linear"):
        targets = None  # all of them is what is done anyway
    if isinstance(targets, str):
        targets = targets.split(",")
    # Of experts, such as `mlp.experts.down_proj`; here the last name is enough.
    experts = said.get("lora_target_parameters") or []
    experts = experts.split(",") if isinstance(experts, str) else experts
    if experts:
        experts = [str(name).rpartition(".")[2] for name in experts]
        targets = [*(targets or ["all-linear"]), *experts]
    if targets:
        parts.append("targets=" + "+".join(str(name).strip() for name in targets))
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


def _init_of(said: Mapping[str, Any], left_out: list[str]) -> str | None:
    """Return how adapters begin, if not at nothing: in axolotl's words, or in LLaMA-Factory's."""
    if said.get("pissa_init"):
        rounds = said.get("pissa_iter", _PISSA_ROUNDS)
        return PISSA if rounds == _PISSA_EXACT else f"{PISSA}_niter_{rounds}"
    asked = said.get("peft_init_lora_weights") or True  # axolotl passes over false
    if asked in (True, "gaussian"):
        return None
    if asked not in (PISSA, OLORA) and rounds_of(str(asked)) is None:
        left_out.append(f"peft_init_lora_weights: {asked!r} has no counterpart")
        return None
    return str(asked)


def _objective(said: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    kind = said.get("rl", said.get("stage", "sft"))
    if kind in ("sft", "pt"):
        return {}
    if kind == "dpo":
        loss = said.get("pref_loss", "sigmoid")
        kind = "dpo" if loss == "sigmoid" else loss
    if kind == "rm":
        return {"objective": "reward"}
    if kind not in PREFERENCES:
        left_out.append(
            f"the objective {kind!r} has no counterpart; ATOM has {', '.join(OBJECTIVES)}"
        )
        return {}
    beta = next((said[name] for name in _BETAS if name in said), None)
    gamma = said.get("simpo_gamma") if kind == "simpo" else None
    numbers = {"beta": beta, "gamma": gamma}
    return {"objective": kind, **{k: float(v) for k, v in numbers.items() if v is not None}}


_FOLDER, _TABLE = "data", "dataset_info.json"
_ROWS_OF_FILES = ("shards", "shards_idx", "num_samples")
"""Take a part of a set's rows."""


def data_of(said: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Return `data` and `validation`, as far as a recipe names them.

    Args:
        said: The recipe, by the other tool's keys.
        left_out: Gets a line for what has no counterpart.
    """
    sources = [*_of_axolotl(said, "datasets", left_out), *_of_factory(said, "dataset", left_out)]
    judged = [
        *_of_axolotl(said, "test_datasets", left_out),
        *_of_factory(said, "eval_dataset", left_out),
    ]
    if said.get("interleave_probs"):
        left_out.append(
            f"interleave_probs: {said['interleave_probs']}: shares have no counterpart; a weight "
            "says how many times a source's rows count in an epoch: --data FILE:2"
        )
    part = said.get("val_set_size", said.get("val_size"))
    if part and not judged:
        left_out.append(f"val_set_size: {part}: a twentieth of the rows is held out")
    found: dict[str, Any] = {}
    if sources:
        times = Counter(sources)
        found["data"] = tuple(name if n == 1 else f"{name}:{n}" for name, n in times.items())
    if judged:
        found["validation"] = judged[0]
        if all(not name.startswith("datasets:") for name in judged):
            found["validation"] = ",".join(judged)  # files of one source
        elif judged[1:]:
            left_out.append(f"test_datasets: one data set is measured on; left out: {judged[1:]}")
    return found


def _of_axolotl(said: Mapping[str, Any], key: str, left_out: list[str]) -> Iterator[str]:
    for part in said.get(key) or []:
        known = part if isinstance(part, Mapping) else {"path": part}
        for name in _ROWS_OF_FILES:
            if known.get(name):
                left_out.append(f"{key}: {name} of {known.get('path')}: all rows are taken")
        files = known.get("data_files")
        if files:
            yield files if isinstance(files, str) else ",".join(map(str, files))
            continue
        path = known.get("path")
        if not isinstance(path, str):
            raise ConfigError(
                f"{key}: path must be the name of a data set or a file, not {path!r}; correct it"
            )
        if isinstance(known.get("type"), Mapping):
            left_out.append(f"{key}: type of {path}: rows need the names of the docs")
        if Path(path).suffix or Path(path).exists():
            yield path
        else:
            yield _named(path, known.get("name"), known.get("split"))


def _of_factory(said: Mapping[str, Any], key: str, left_out: list[str]) -> Iterator[str]:
    names = said.get(key) or []
    folder = Path(str(said.get("dataset_dir", _FOLDER)))
    table = _table(folder / _TABLE)
    for name in names.split(",") if isinstance(names, str) else map(str, names):
        known = table.get(name.strip())
        if not isinstance(known, Mapping):
            left_out.append(
                f"{key}: {name.strip()!r} is a name of {_TABLE}, and {folder} has none that knows "
                f"it; give its file with {'--data' if key == 'dataset' else '--validation'}"
            )
            continue
        if known.get("columns"):
            left_out.append(f"{key}: columns of {name.strip()!r}: rows need the names of the docs")
        if known.get("num_samples"):
            left_out.append(f"{key}: num_samples of {name.strip()!r}: all rows are taken")
        if known.get("file_name"):
            yield str(folder / str(known["file_name"]))
        else:
            yield _named(str(known.get("hf_hub_url")), known.get("subset"), known.get("split"))


def _named(name: str, subset: Any, split: Any) -> str:
    parts = [subset, split or ("train" if subset else None)]
    return ":".join(["datasets", name, *(str(part) for part in parts if part)])


def _table(file: Path) -> dict[str, Any]:
    """Return LLaMA-Factory's table of data sets, empty if it is not there."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
