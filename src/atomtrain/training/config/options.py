"""What a user can say to `atom train`; everything has a working default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError
from atomtrain.settings import (
    MOST_COUNT,
    asked,
    check_fields,
    check_name,
    check_size,
    check_text,
    count,
    number,
    one_of,
    option,
)
from atomtrain.swarm.anchors.updates import check_outer_name
from atomtrain.swarm.membership.config import SwarmConfig
from atomtrain.swarm.membership.rules import (
    Rules,
    check_group_size,
    check_mean,
)
from atomtrain.swarm.packages import missing_packages
from atomtrain.swarm.transport.endpoint import Endpoint
from atomtrain.training.config.recipe import Recipe, check_share

CHECKS = ("auto", "always", "never")
"""When a model is compared with its layers."""
_RUNS = Path("runs")


def _check_metrics(_: str, targets: tuple[str, ...]) -> None:
    from atomtrain.metrics.names import parse_targets

    parse_targets(targets)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of one peer (or of several on this machine).

    `None` means: as the checkpoint or the swarm says, else the recipe's default.
    """

    model: str | None = asked(Recipe, "model")
    data: tuple[str, ...] = option(
        (),
        "Text to train on: a file, a folder or a pattern such as 'books/*.txt'; or rows with "
        "answers (.jsonl, .json, .csv, .tsv, .parquet, datasets:NAME) for a Hugging Face model. "
        "May be given several times, each with a weight: FILES:2 counts twice in an epoch. "
        "Default: the demo corpus (pip install 'atomtrain[demo]').",
        "FILES",
    )
    validation: str | None = option(
        None,
        "Text or rows, as --data, on which the held-out loss is measured. Then nothing of --data "
        "is held out. Default: a twentieth of --data.",
        "FILES",
    )
    run: str | None = option(
        None,
        "Start a run of this name that other peers can join (or resume it, with --resume).",
        "NAME",
        check=check_name,
    )
    join: tuple[str, ...] = option(
        (),
        "Join the run of a peer at this address; several, separated by commas or each with --join, "
        "are tried at once. 'lan' stands for the peers of the local network (of --run, if several "
        "runs are there).",
        "ADDRESS",
    )
    peers: int | None = option(
        None,
        "Peers to start on this machine. Default: 2 for the demo, else 1.",
        "N",
        check=count(most=1024),
    )
    resume: bool = option(False, "Continue from the newest checkpoint of --run.", "")
    dry_run: bool = option(
        False,
        "Say what the run would be (data, plan, time, disk), and stop before the first step.",
        "",
    )
    steps: int | None = asked(Recipe, "steps")
    epochs: float | None = option(
        None,
        "Passes over the data, instead of --steps; each peer makes them.",
        "NUMBER",
        check=number(lambda n: 0 < n < MOST_COUNT, f"above 0 and at most {MOST_COUNT}"),
    )
    device: str = option(
        "auto",
        "auto, cpu (the host itself, nothing is copied), cuda, cuda:NUMBER, xpu, "
        "xpu:NUMBER, emulated or emulated:LINK such as emulated:4GiB/s; several with commas "
        "between them, such as cuda:0,cuda:1, divide the micro-batches of each step.",
        "DEVICE",
    )
    device_memory: str | None = option(
        None,
        "Budget of each device, such as 256MiB. Default: small for demo and tiny, else 90% of what "
        "the GPU has free, all memory of the host for cpu, or 1GiB for the emulated device.",
        "SIZE",
        check=check_size,
    )
    host_memory: str | None = asked(Options, "host_memory")
    disk: Path | None = asked(Options, "disk")
    on_disk: str | None = asked(Options, "on_disk")
    sequences: int | None = asked(Recipe, "sequences")
    micro_batch: int | None = option(
        None,
        "Sequences of one micro-batch; divides --sequences. Default: the largest that fits well.",
        "N",
        check=count(),
    )
    context: int | None = asked(Recipe, "context")
    lora: str | None = asked(Recipe, "lora")
    objective: str | None = asked(Recipe, "objective")
    beta: float | None = asked(Recipe, "beta")
    gamma: float | None = asked(Recipe, "gamma")
    packing: bool = asked(Recipe, "packed", False)
    train_tower: bool = asked(Recipe, "train_tower", False)
    neftune_noise_alpha: float | None = asked(Recipe, "neftune_noise_alpha")
    head_pieces: int | None = asked(Options, "head_pieces")
    learning_rate: float | None = asked(Recipe, "learning_rate")
    warmup_steps: int | None = asked(Recipe, "warmup_steps")
    warmup_ratio: float | None = option(
        None, "The same as a part of all steps, such as 0.03.", "PART", check=check_share
    )
    weight_decay: float | None = asked(Recipe, "weight_decay")
    layer_lr_decay: float | None = asked(Recipe, "layer_lr_decay")
    optimizer: str | None = asked(Recipe, "optimizer")
    precision: str | None = asked(Recipe, "precision")
    gradient_dtype: str | None = asked(Recipe, "gradient_dtype")
    clip_norm: float | None = asked(Recipe, "clip_norm")
    spend_gradients: bool = asked(Options, "spend_gradients", False)
    schedule: str | None = asked(Recipe, "schedule")
    dropout: float | None = option(None, "Dropout probability.", "P", check=check_share)
    vocabulary: int | None = option(
        None,
        "Tokens of the tokenizer that is trained on the text. Default: the model's published size.",
        "N",
        check=count(most=1 << 24),
    )
    seed: int | None = asked(Recipe, "seed")
    local_steps: int | None = asked(Rules, "local_steps_per_round")
    measured_rounds: bool = option(
        False,
        "Average as often as the link allows, as is the default: for resuming a run that was "
        "started with --local-steps.",
        "",
    )
    wire: str | None = asked(Rules, "wire")
    average: str | None = asked(Rules, "average")
    target_batch_tokens: int | None = asked(Rules, "target_batch_tokens")
    group_size: int | None = asked(Rules, "group_size")
    outer: str | None = option(
        None,
        "What a round does with the mean change: nesterov (momentum that fits the steps between "
        "rounds) or mean (plain averaging); set by who starts the run. Default: nesterov.",
        "NAME",
        check=check_outer_name,
    )
    mean: str | None = asked(Rules, "mean")
    upload_limit: str | None = asked(SwarmConfig, "upload_limit_bytes_per_s")
    relay_limit: str | None = asked(SwarmConfig, "relay_limit_bytes_per_s")
    run_key: Path | None = asked(SwarmConfig, "key_path")
    allow: Path | None = asked(SwarmConfig, "allow_path")
    evaluate_every: int | None = asked(Recipe, "evaluate_every")
    checkpoint_every: int | None = asked(Recipe, "checkpoint_every")
    directory: Path = option(
        _RUNS, "Folder of runs; this peer writes to DIRECTORY/RUN/NAME.", "FOLDER"
    )
    name: str | None = option(
        None,
        "Name of this peer. Default: peer-0, or a new name for a peer that joins; with --resume, "
        "that of the run's only peer that has saved here.",
        "NAME",
        check=check_name,
    )
    host: str | None = asked(Endpoint, "listen_host")
    port: int = asked(Endpoint, "listen_port", 0)
    announce: str | None = asked(Endpoint, "announce_host")
    identity: Path | None = asked(Endpoint, "identity_path")
    hidden: bool = option(
        False, "Do not answer those who search the local network for runs to join.", ""
    )
    prompt: str = option(
        "In the beginning",
        "Start of the sentences that are generated at the end.",
        "TEXT",
        check=check_text,
    )
    threads: int | None = option(
        None,
        "CPU threads of each peer. Default: all cores, divided among the local peers.",
        "N",
        check=count(most=1024),
    )
    no_profile: bool = option(
        False,
        "Do not measure this machine before planning; take a GPU's figures from the catalogue.",
        "",
    )
    check_model: str = option(
        "auto",
        "Compare loss and gradients of one micro-batch with the Hugging Face model's own, bit for "
        "bit, before a run begins: auto (models of up to 1 GiB and 20 s), always or never.",
        "WHEN",
        check=one_of(CHECKS),
    )
    profile_again: bool = option(
        False,
        "Measure this machine anew, whatever was measured before. Default: once a week, and when "
        "it is less busy than it was then.",
        "",
    )
    compile: bool | Literal["auto"] = asked(Options, "compile", "auto")
    deterministic: bool = asked(Options, "deterministic", False)
    trace: Path | None = option(
        None,
        "Write what each stream did in the last step, beside what the plan predicted, as a trace "
        "for ui.perfetto.dev. Of several local peers the first one does.",
        "FILE",
    )
    metrics: tuple[str, ...] = option(
        (),
        "Also send the run's numbers to tensorboard[:FOLDER], wandb[:PROJECT], trackio[:PROJECT] "
        "or prometheus:[HOST:]PORT; may be given several times.",
        "WRITER",
        check=_check_metrics,
    )
    plain: bool = option(False, "Plain lines instead of the live display.", "")

    def __post_init__(self) -> None:
        """Check what was given; raises `ConfigError`."""
        check_fields(self)
        self._check_together()

    @property
    def is_demo(self) -> bool:
        """Whether the user named nothing: then the demonstration with two peers runs."""
        return (
            self.model is None
            and not self.data
            and self.validation is None
            and self.run is None
            and not self.join
            and not self.resume
        )

    @property
    def listen_host(self) -> str:
        """IPv4 address to listen on; a run without a name is not open to other machines."""
        if self.host is not None:
            return self.host
        return "0.0.0.0" if self.run is not None or self.join else "127.0.0.1"

    @property
    def n_peers(self) -> int:
        """Local peers to start: of the demonstration two, where a swarm can be had."""
        if self.peers is not None:
            return self.peers
        return 2 if self.is_demo and not missing_packages() else 1

    def _check_together(self) -> None:
        if self.on_disk is not None:
            from atomtrain.planning.plan.disk import on_disk_up_to

            if on_disk_up_to(self.on_disk) and self.disk is None:
                raise ConfigError(f"--on-disk {self.on_disk} needs a folder: --disk FOLDER")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("--steps and --epochs contradict each other; give one of them")
        if self.epochs is not None and (self.resume or self.join):
            raise ConfigError("--epochs is for new runs; --resume and --join take --steps")
        if self.warmup_ratio is not None:
            if self.warmup_steps is not None:
                raise ConfigError(
                    "--warmup-ratio and --warmup-steps contradict each other; give one of them"
                )
            if self.resume or self.join:
                raise ConfigError(
                    "--warmup-ratio is for new runs; leave it out: the run has its own"
                )
        if self.measured_rounds and self.local_steps is not None:
            raise ConfigError(
                "--measured-rounds and --local-steps contradict each other; give one of them"
            )
        if (self.average == "gradient") != (self.target_batch_tokens is not None):
            raise ConfigError(
                "--average gradient and --target-batch-tokens N belong together: give both, or "
                "neither"
            )
        if self.group_size is not None:
            check_group_size(self.group_size, self.average or "local")
        check_mean(self.mean, self.average or "local")
        if self.resume and self.run is None:
            raise ConfigError("--resume needs the name of the run: --run NAME --resume")
