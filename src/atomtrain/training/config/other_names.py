"""What the options of other tools are called here, those of `transformers` above all.

Who types `--per-device-train-batch-size 4` or `num_train_epochs: 3` means something that ATOM has
under another name. It is translated, and the run says into what. Values that cannot be translated
are refused, never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atomtrain.errors import ConfigError, choices
from atomtrain.settings import flag_of

BATCH = ("batch_size", "per_device_train_batch_size", "micro_batch_size")
"""Sequences of one forward call, as others call them."""
ACCUMULATION = ("gradient_accumulation", "gradient_accumulation_steps")
"""Forward calls of one step."""
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "adamw_8bit": "adamw-int8",
    "adamw_bnb_8bit": "adamw-int8",
    "paged_adamw_8bit": "adamw-int8",
    "sgd": "sgd",
    "muon": "muon",
}


def _same(_: str, value: Any) -> Any:
    return value


def _one_in(table: Mapping[str, str]) -> Callable[[str, Any], str]:
    def named(name: str, value: Any) -> str:
        if value not in table:
            raise ConfigError(f"{name} {value!r} is not known; choose {choices(value, table)}")
        return table[value]

    return named


class Name(NamedTuple):
    """One option under another name."""

    ours: str
    kind: type = int
    """Of the value."""
    convert: Callable[[str, Any], Any] = _same


NAMES = {
    "lr": Name("learning_rate", float),
    "max_steps": Name("steps"),
    "num_train_epochs": Name("epochs", float),
    "num_epochs": Name("epochs", float),
    "max_grad_norm": Name("clip_norm", float),
    "eval_steps": Name("evaluate_every"),
    "save_steps": Name("checkpoint_every"),
    "max_length": Name("context"),
    "max_seq_length": Name("context"),
    "sequence_len": Name("context"),
    "cutoff_len": Name("context"),
    "model_name_or_path": Name("model", str),
    "base_model": Name("model", str),
    "sample_packing": Name("packing", bool),
    "lr_scheduler": Name("schedule", str, _one_in(SCHEDULES)),
    "lr_scheduler_type": Name("schedule", str, _one_in(SCHEDULES)),
    "optim": Name("optimizer", str, _one_in(OPTIMIZERS)),
    "torch_compile": Name("compile", bool),
    "full_determinism": Name("deterministic", bool),
}
_SWAPPED = "swapping takes its place; leave it out"
_PLANNED = "the plan decides this; leave it out"
_LORA = "give --lora, such as --lora r=8,alpha=16"
_FROZEN = "give --lora with bits=8 or bits=4"
_DATA = "give --data"
_READ = "data are read ahead without it; leave it out"
_EVALUATED = "give --evaluate-every N"
_SAVED = "give --checkpoint-every N"
_LAST_KEPT = "the last two checkpoints are kept; leave it out"
_LOGGED = "every step is logged; leave it out"
_METRICS = "give --metrics"
_SEVERAL = "give --device cuda:0,cuda:1, or --peers N"
_HUB = "see atom export --push"
_MOMENTS = "AdamW has betas of 0.9 and 0.95 here; leave it out"
_PRECISION = "give --precision"
_OBJECTIVE = "give --objective; next-token is the default"
_VALIDATION = "give --validation FILE, or leave it out: some of the data is held out"
_TEMPLATE = "the model's own template is used; leave it out"
_TOKENIZER = "the model's own tokenizer is used; leave it out"
_DEVICE = "give --device, such as cuda:0"
_OTHERS = "other machines join with --join; leave it out"
_MISSING = "it has no counterpart; leave it out"
ADVICE = {
    "attn_implementation": "attention is PyTorch's own; leave it out",
    "auto_find_batch_size": _PLANNED,
    "config": "name the recipe itself: atom train FILE",
    "data_seed": "give --seed",
    "deepspeed": _SWAPPED,
    "evals_per_epoch": _EVALUATED,
    "finetuning_type": _LORA,
    "flash_attn": "attention is PyTorch's own; leave it out",
    "fsdp": _SWAPPED,
    "fsdp_config": _SWAPPED,
    "load_in_4bit": _FROZEN,
    "load_in_8bit": _FROZEN,
    "local_rank": _SEVERAL,
    "nproc_per_node": _SEVERAL,
    "num_processes": _SEVERAL,
    **dict.fromkeys(("output_dir", "save_dir"), "give --directory, and --run for the run's name"),
    "parallelism_config": _SEVERAL,
    "per_device_eval_batch_size": "it is that of training; leave it out",
    "push_to_hub": _HUB,
    **dict.fromkeys(("checkpoint", "resume_from_checkpoint"), "give --run NAME --resume"),
    **dict.fromkeys(
        ("gpu_memory", "gpu_memory_utilization", "max_memory", "memory"),
        "give --device-memory, such as 8GiB",
    ),
    "tokens_per_step": "give --sequences N: a step has N sequences of --context tokens",
    "run_name": "give --run",
    "saves_per_epoch": _SAVED,
    "save_strategy": _SAVED,
    "tf32": "see --precision; leave it out",
    "trust_remote_code": "code of a model's folder is never run; leave it out",
    "use_cpu": "give --device cpu",
    "use_peft": _LORA,
    "accumulate_grad_batches": "give --sequences, and --micro-batch for one forward call",
    "block_size": "give --context",
    "full_finetuning": "it is what is done without --lora; leave it out",
    "load_in_16bit": _PRECISION,
    "max_epochs": "give --epochs",
    "no_cuda": "give --device cpu",
    "overwrite_output_dir": "a run is never overwritten; give --run for another name",
    "plot_loss": "the picture of the loss is always made; leave it out",
    "quantization_bit": _FROZEN,
    "save_method": "see atom export; leave it out",
    "streaming": "give --data stream:NAME",
    "train_on_inputs": "the loss is on answers only; leave it out",
    **dict.fromkeys(
        (
            *("adapter", "lora_alpha", "lora_dropout", "lora_r", "lora_rank", "lora_target"),
            *("lora_target_linear", "lora_target_modules", "use_dora", "use_rslora"),
            *("peft_config", "target_modules", "use_lora"),
        ),
        _LORA,
    ),
    **dict.fromkeys(
        ("dataset", "dataset_config_name", "dataset_dir", "dataset_name", "train_file"), _DATA
    ),
    **dict.fromkeys(("dtype", "fp16_opt_level", "mixed_precision", "torch_dtype"), _PRECISION),
    **dict.fromkeys(("pref_loss", "rl", "stage"), _OBJECTIVE),
    **dict.fromkeys(("chat_template", "template"), _TEMPLATE),
    **dict.fromkeys(("tokenizer", "tokenizer_name", "tokenizer_name_or_path"), _TOKENIZER),
    **dict.fromkeys(("bits", "bnb_4bit_quant_type", "load_in_nf4", "quantization"), _FROZEN),
    **dict.fromkeys(("model_revision", "revision"), "give the folder of that revision to --model"),
    **dict.fromkeys(("quiet", "silent", "verbose"), "give --plain for lines in place of a display"),
    **dict.fromkeys(("eval_dataset", "val_set_size", "val_size", "validation_file"), _VALIDATION),
    **dict.fromkeys(
        ("clip_grad", "grad_clip", "gradient_clip_val", "gradient_clipping"), "give --clip-norm"
    ),
    **dict.fromkeys(("accelerator", "devices", "gpu", "gpus", "num_gpus"), _DEVICE),
    **dict.fromkeys(
        (
            *("backend", "context_parallel_size", "pipeline_parallel_size", "rank"),
            *("sequence_parallel_size", "tensor_parallel_size", "tp", "world_size"),
        ),
        _SEVERAL,
    ),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "strategy", "zero_stage"), _SWAPPED),
    **dict.fromkeys(
        (
            *("machine_rank", "main_process_ip", "main_process_port", "master_addr"),
            *("master_port", "nnodes", "node_rank", "num_machines", "rdzv_endpoint"),
        ),
        _OTHERS,
    ),
    **dict.fromkeys(
        (
            *("activation_checkpointing", "activation_checkpointing_kwargs"),
            "use_gradient_checkpointing",
            *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
            *("bf16_full_eval", "fp16_full_eval", "torch_empty_cache_steps"),
        ),
        _PLANNED,
    ),
    **dict.fromkeys(
        (
            *("dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context"),
            *("dataloader_num_workers", "dataloader_persistent_workers"),
            *("dataloader_pin_memory", "dataloader_prefetch_factor", "preprocessing_num_workers"),
            "num_workers",
        ),
        _READ,
    ),
    **dict.fromkeys(
        (
            *("ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb"),
            *("ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout"),
        ),
        _SEVERAL,
    ),
    **dict.fromkeys(
        ("do_eval", "eval_delay", "eval_on_start", "eval_strategy", "evaluation_strategy"),
        _EVALUATED,
    ),
    **dict.fromkeys(
        ("save_only_model", "save_total_limit", "load_best_model_at_end", "metric_for_best_model"),
        _LAST_KEPT,
    ),
    **dict.fromkeys(
        (
            *("hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision"),
            *("hub_strategy", "hub_token"),
        ),
        _HUB,
    ),
    **dict.fromkeys(
        (
            *("disable_tqdm", "log_dir", "log_level", "log_level_replica", "log_on_each_node"),
            *("logging_dir", "logging_first_step", "logging_nan_inf_filter", "logging_steps"),
            "logging_strategy",
        ),
        _LOGGED,
    ),
    **dict.fromkeys(
        (
            *("project", "report_to", "trackio_bucket_id", "trackio_space_id"),
            *("trackio_static_space_id", "use_tensorboard", "wandb_entity", "wandb_project"),
        ),
        _METRICS,
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), _MOMENTS),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), "give --compile on"),
    **dict.fromkeys(
        (
            *("accelerator_config", "average_tokens_across_devices", "batch_eval_metrics"),
            *("debug", "do_predict", "do_train", "enable_jit_checkpoint", "greater_is_better"),
            *("eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object"),
            *("group_by_length", "ignore_data_skip", "include_for_metrics"),
            *("include_num_input_tokens_seen", "label_names", "label_smoothing_factor"),
            *("length_column_name", "liger_kernel_config", "lr_scheduler_kwargs", "optim_args"),
            *("optim_target_modules", "prediction_loss_only", "remove_unused_columns"),
            *("restore_callback_states_from_checkpoint", "save_on_each_node"),
            *("skip_memory_metrics", "train_sampling_strategy", "use_cache", "use_liger_kernel"),
            *("dataset_prepared_path", "early_stopping_patience", "enable_liger_kernel"),
            *("max_samples", "max_train_samples", "overwrite_cache"),
        ),
        _MISSING,
    ),
}
"""What to do instead, by names of others' options that are not understood."""
KINDS: dict[str, type] = {
    **{name: known.kind for name, known in NAMES.items()},
    **dict.fromkeys((*BATCH, *ACCUMULATION), int),
    "bf16": bool,
    "fp16": bool,
}
"""All names that are understood, and the types of their values."""
KIND_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_CONFIGURATIONS = {
    "compute_environment": "accelerate",
    "distributed_type": "accelerate",
    "zero_optimization": "DeepSpeed",
}
"""Keys of files that say how a training is distributed, and whose files these are."""


class Translation(NamedTuple):
    """What was understood."""

    values: dict[str, Any]
    """By the names of `atom train`'s options."""
    sources: dict[str, str]
    """Of each of them, the name that was given."""
    line: str
    """What to tell the user; empty if there was nothing to translate."""


def check_not_configuration(path: Path, keys: Collection[str]) -> None:
    """Refuse a file that says how others distribute a training, not what is trained.

    Raises:
        ConfigError: it is one.
    """
    for key, tool in _CONFIGURATIONS.items():
        if key in keys:
            raise ConfigError(
                f"{path} is a configuration of {tool}, no recipe: swapping takes its place; leave "
                "it out ('atom init' asks and writes a recipe)"
            )


def translated(
    said: Mapping[str, Any], known: Mapping[str, Any], below: Mapping[str, Any] | None = None
) -> Translation:
    """Return what options of other tools mean.

    Args:
        said: Values by names of `KINDS`.
        known: What was given beside them under ATOM's own names.
        below: What counts where nothing else is said, such as a file below a command line.

    Raises:
        ConfigError: a value that has no counterpart, or two names for one thing that differ.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def take(name: str, ours: str, value: Any) -> None:
        before = {**known, **values}.get(ours, value)
        if before is not value and before != value:  # no NaN equals itself
            other = sources.get(ours, ours)
            raise ConfigError(
                f"{_exactly(name, said[name])} and {_exactly(other, said.get(other, before))} "
                "contradict each other; give one of them"
            )
        values[ours], sources[ours] = value, name

    for name, value in said.items():
        if name == "max_steps" and value == -1:  # as many as the epochs have
            continue
        if name in NAMES:
            take(name, NAMES[name].ours, NAMES[name].convert(flag_of(name), value))
        elif name in ("bf16", "fp16") and value:
            take(name, "precision", name)
    all_known = {**(below or {}), **known}
    for name, ours, value in _batches(said, all_known):
        take(name, ours, value)
    return Translation(values, sources, _line(said, values))


def _batches(said: Mapping[str, Any], known: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Return what batch size and accumulation say of micro-batch and step."""
    batch, often = _one_of(BATCH, said), _one_of(ACCUMULATION, said)
    for name in (*BATCH, *ACCUMULATION):
        if name in said and said[name] < 1:
            raise ConfigError(f"{flag_of(name)} must be at least 1, not {said[name]}")
    if batch is None and often is None:
        return []
    times = said[often] if often is not None else 1
    if batch is not None:
        found = [(batch, "micro_batch", said[batch])]
        if often is not None or "sequences" not in known:
            found.append((often or batch, "sequences", said[batch] * times))
        return found
    assert often is not None
    if "micro_batch" in known:
        return [(often, "sequences", known["micro_batch"] * times)]
    if "sequences" not in known or known["sequences"] % times:
        raise ConfigError(
            f"{flag_of(often)} {times} needs the sequences of one forward call: give --micro-batch "
            f"N too, or --sequences N that {times} divides"
        )
    return [(often, "micro_batch", known["sequences"] // times)]


def _one_of(names: tuple[str, ...], said: Mapping[str, Any]) -> str | None:
    """Return the one name that was given; several must agree."""
    given = [name for name in names if name in said]
    if len({said[name] for name in given}) > 1:
        both = " and ".join(f"{flag_of(name)} {said[name]}" for name in given)
        raise ConfigError(f"{both} contradict each other; give one of them")
    return given[0] if given else None


def _line(said: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    if not said:
        return ""
    given = " ".join(_shown(name, value) for name, value in said.items())
    taken = " ".join(_shown(name, value) for name, value in values.items())
    return f"{given} is taken as {taken}" if taken else f"{given} changes nothing"


def _exactly(name: str, value: Any) -> str:
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag_of(name) if value else f"{flag_of(name)}=false"
    return f"{flag_of(name)} {value:g}" if isinstance(value, float) else f"{flag_of(name)} {value}"
