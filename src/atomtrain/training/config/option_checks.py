"""Mistakes in what a user says to `atom train`, told in one line before anything is prepared."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from atomtrain.errors import ConfigError, choices
from atomtrain.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from atomtrain.training.config.options import TrainOptions

NAME_MAX = 64
WIRES = ("float16", "float32", "int8", "int4", "topk")
"""Names of the codecs, told here so that a wrong one is refused at once; a test compares."""
_MOST_COUNT, _MOST_TOKENS = 2**31 - 1, 2**53
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
CHECKS = ("auto", "always", "never")
"""When a model is compared with its layers."""
OBJECTIVES = ("next-token", "dpo")


def check_options(given: TrainOptions) -> None:
    """Refuse mistakes before anything is prepared.

    Raises:
        ConfigError: names the option, what was given and what is allowed.
    """
    check_counts(
        given,
        "steps", "micro_batch", "context", "head_pieces", "local_steps", "evaluate_every",
        "checkpoint_every",
    )  # fmt: skip
    check_counts(given, "peers", "threads", most=1024)
    check_counts(given, "sequences", most=1 << 20)
    check_counts(given, "vocabulary", most=1 << 24)
    check_text("--prompt", given.prompt)
    if given.learning_rate is not None and not 0 < given.learning_rate < 10:
        raise ConfigError(
            f"--learning-rate must be above 0 and below 10, not {given.learning_rate}"
        )
    check_clip_norm(given.clip_norm)
    check_seed(given.seed)
    memory_of(given)
    if given.on_disk is not None:
        from atomtrain.planning.plan.disk import on_disk_up_to

        if on_disk_up_to(given.on_disk) and given.disk is None:
            raise ConfigError(f"--on-disk {given.on_disk} needs a folder: --disk FOLDER")
    check_port(given.port)
    if given.announce is not None and not _HOST.fullmatch(given.announce):
        raise ConfigError(
            f"--announce takes a host name or an IPv4 address, such as 203.0.113.7, not "
            f"{given.announce!r}"
        )
    for name in ("run", "name"):
        value = getattr(given, name)
        if value is not None:
            _check_name(_flag(name), value)
    if given.measured_rounds and given.local_steps is not None:
        raise ConfigError(
            "--measured-rounds and --local-steps contradict each other; give one of them"
        )
    if given.metrics:
        from atomtrain.metrics.targets import parse_targets

        parse_targets(given.metrics)
    _check_parts(given)
    if given.check_model not in CHECKS:
        raise ConfigError(
            f"--check-model {given.check_model!r} does not exist; choose "
            f"{choices(str(given.check_model), CHECKS)}"
        )
    if given.resume and given.run is None:
        raise ConfigError("--resume needs the name of the run: --run NAME --resume")


def check_counts(given: Any, *names: str, least: int = 1, most: int = _MOST_COUNT) -> None:
    """Refuse options of these names that are given and not in a range."""
    for name in names:
        value = getattr(given, name)
        if value is None or least <= value <= most:
            continue
        limit = f"at least {least}" if value < least else f"at most {most}"
        raise ConfigError(f"{_flag(name)} must be {limit}, not {value}")


def memory_of(given: Any) -> dict[str, Any]:
    """Return `host_memory_bytes` and `device_memory_bytes`, as far as they are given.

    Raises:
        ConfigError: one is no size.
    """
    return {
        f"{name}_bytes": parse_bytes(text, _flag(name))
        for name in ("host_memory", "device_memory")
        if (text := getattr(given, name)) is not None
    }


def check_seed(seed: int | None) -> None:
    """Refuse what no random generator takes."""
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(f"--seed must be 0 to 2^63 - 1, not {seed}")


def check_clip_norm(norm: float | None) -> None:
    """Refuse what is no norm."""
    if norm is not None and not 0 <= norm < math.inf:
        raise ConfigError(f"--clip-norm must be a norm, or 0 for no clipping, not {norm:g}")


def check_spending(clip_norm: float, precision: str, *, averaged: bool = False) -> None:
    """Refuse to spend gradients at once where they are wanted again.

    Raises:
        ConfigError: they wait for their norm, for overflows, or for other peers'.
    """
    waits = None
    if clip_norm:
        waits = f"for the norm to which they are clipped, {clip_norm:g}; give --clip-norm 0"
    elif precision == "fp16":
        waits = "till none has overflowed, with --precision fp16; choose bf16"
    elif averaged:
        waits = "for those of other peers; choose --average local"
    if waits is not None:
        raise ConfigError(f"--spend-gradients cannot be: gradients wait {waits}, or leave it out")


def check_text(flag: str, text: str) -> None:
    """Refuse bytes that are no text; Python's strings may carry them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{flag} is not text in UTF-8; write it in that encoding") from error


def check_port(port: int) -> None:
    """Refuse what is no TCP port."""
    if not 0 <= port < 65536:
        raise ConfigError(f"--port must be 0 to 65535, not {port}")


def _check_parts(given: TrainOptions) -> None:
    """Refuse mistakes in what has parts of its own."""
    if given.lora is not None:
        from atomtrain.models.lora_config import parse_lora

        parse_lora(given.lora)
    if given.wire is not None:
        check_wire(given.wire)
    _check_objective(given.objective, given.beta)
    check_counts(given, "target_batch_tokens", most=_MOST_TOKENS)
    _check_average(given.average, given.target_batch_tokens)
    if given.group_size is not None:
        from atomtrain.swarm.membership.config import check_group_size

        check_group_size(given.group_size, given.average or "local", given.transport or "streams")
    if given.transport is not None:
        from atomtrain.swarm.membership.config import check_transport

        check_transport(given.transport, given.wire, clipped=given.clipped_mean)
    _check_upload_limit(given.upload_limit, given.transport)
    relay_limit_of(given.relay_limit)
    if given.outer is not None:
        from atomtrain.swarm.anchors.updates import outer_named

        outer_named(given.outer, 0, 1)
    if given.run_key is not None or given.allow is not None:
        from atomtrain.swarm.membership.admission import read_allowed, read_key

        if given.run_key is not None:
            read_key(given.run_key)
        if given.allow is not None:
            read_allowed(given.allow)
    if given.identity is not None and given.identity.exists():
        from atomtrain.swarm.transport.identity import Identity

        Identity.load(given.identity)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_objective(objective: str | None, beta: float | None) -> None:
    if objective is not None and objective not in OBJECTIVES:
        raise ConfigError(
            f"--objective {objective!r} does not exist; choose {choices(objective, OBJECTIVES)}"
        )
    if beta is not None and not 0 < beta < math.inf:
        raise ConfigError(f"--beta must be above 0, such as 0.1, not {beta}")


def _check_average(average: str | None, target_tokens: int | None) -> None:
    ways = ("local", "gradient")
    if average is not None and average not in ways:
        raise ConfigError(f"--average {average!r} does not exist; choose {choices(average, ways)}")
    if (average == "gradient") != (target_tokens is not None):
        raise ConfigError(
            "--average gradient and --target-batch-tokens N belong together: give both, or neither"
        )


def _check_upload_limit(limit: str | None, transport: str | None) -> None:
    if limit is None:
        return
    if parse_rate(limit, "--upload-limit") < 1000:
        raise ConfigError(f"--upload-limit must be at least 8kbit/s, not {limit}")
    if transport == "gloo":
        raise ConfigError("--upload-limit does not limit --transport gloo; leave one of them out")


def relay_limit_of(limit: str | None) -> float:
    """Return `--relay-limit` in bytes per second; 0 passes on nothing.

    Raises:
        ConfigError: it is no rate of at least 8kbit/s, nor `none`.
    """
    if limit is None:
        return math.inf
    if limit == "none":
        return 0.0
    rate = parse_rate(limit, "--relay-limit")
    if rate < 1000:
        raise ConfigError(f"--relay-limit must be none or at least 8kbit/s, not {limit}")
    return rate


def check_wire(name: str) -> None:
    """Refuse a wire format that does not exist."""
    if name not in WIRES:
        raise ConfigError(f"wire format {name!r} does not exist; choose {choices(name, WIRES)}")


def _check_name(flag: str, name: str) -> None:
    plain = name.replace("-", "").replace("_", "").replace(".", "")
    if not (0 < len(name) <= NAME_MAX and plain.isalnum() and plain.isascii()):
        raise ConfigError(
            f"{flag} {name!r} is no name; use 1 to {NAME_MAX} letters, digits, '-', '_' or '.'"
        )
