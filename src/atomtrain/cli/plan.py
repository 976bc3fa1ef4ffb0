"""`atom plan`: what a model would do on a machine, before anything is allocated."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from atomtrain.cli.parsing import leaving_at_once, parse
from atomtrain.errors import ConfigError, choices
from atomtrain.settings import check_counts, memory_of, option
from atomtrain.training.config.optimizing import (
    AUTO,
    check_gradient_dtype,
    check_optimizer,
    check_precision,
    check_precision_choice,
)
from atomtrain.training.config.preflight import (
    check_gpu_name,
    check_model_name,
    check_model_place,
)
from atomtrain.training.config.recipe import check_norm, check_spending

if TYPE_CHECKING:
    from atomtrain.planning.plan.machine import Machine
    from atomtrain.planning.plan.shape import Activation
    from atomtrain.planning.search.batch_search import Workload
    from atomtrain.views.plans.pictured import Pictured
    from atomtrain.views.plans.report import Report
    from atomtrain.views.plans.subject import Place, Subject

_ACTIVATIONS = ("recompute", "keep", "offload")
_ADVICE = {
    "sequences": "give --tokens-per-step N: as many as --sequences of atom train times --context",
    "gpu_memory": "give --device-memory, such as 8GiB",
    "memory": "give --device-memory, such as 8GiB",
}
"""What to do instead of what `atom train` and other tools call something."""
_EXAMPLES = """\
  atom plan gpt3-13b --gpu rtx-3090 --host-memory 256GiB
  atom plan gpt3-175b --gpu h100 --host-memory 4TiB --picture plan.png --trace plan.json
  atom plan models/llama-3-70b --gpu a100-80gb --host-memory 2TiB --tokens-per-step 65536
  atom plan gpt3-13b --gpu rtx-4090 --host-memory 96GiB --disk nvme-pcie4
  atom plan gpt3-13b --gpu rtx-3090 --devices 4 --host-memory 512GiB
  atom plan gpt3-small                              this machine, measured
  atom plan gpt3-13b --gpu rtx-3090 --precision bf16 --optimizer adamw-int8
  atom plan models/llama-70b --gpu rtx-3090 --precision bf16 --lora r=16,alpha=32,bits=4
  atom plan gpt3-xl --gpu rtx-3090 --save mine.json
  atom plan gpt3-xl --gpu rtx-3090 --machine mine.json --json"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    model: str = option(
        None,
        "Model by name (gpt3-small to gpt3-175b), the path of a Hugging Face config.json or of a "
        "folder with one, or an id such as org/name.",
        "MODEL",
    )
    gpu: str | None = option(
        None, "GPU of the catalogue, such as rtx-3090 or h100. Default: this machine.", "NAME"
    )
    devices: int = option(1, "GPUs of the host that divide a step's micro-batches among them.", "N")
    host_memory: str | None = option(
        None, "Host memory, such as 128GiB. Default: what a usual host of the GPU holds.", "SIZE"
    )
    device_memory: str | None = option(
        None, "Device budget, such as 8GiB. Default: 90% of the GPU's memory.", "SIZE"
    )
    disk: str | None = option(
        None,
        "Disk for state that host memory cannot hold: a name of the catalogue (nvme-pcie3, "
        "nvme-pcie4, nvme-pcie5), or a folder of this machine, which is measured.",
        "DISK",
    )
    on_disk: str | None = option(
        None,
        "State that is on disk: nothing, moments, masters (and moments) or parameters (and both; "
        "with one device). Default: as little as host memory demands.",
        "KIND",
    )
    context: int | None = option(
        None, "Tokens of a sequence. Default: the model's, at most 4096 from a file.", "N"
    )
    data: tuple[str, ...] = option(
        (), "Rows with images, of which the largest are counted; as --data of atom train.", "FILES"
    )
    tokens_per_step: int | None = option(
        None, "Tokens of a step. Default: what lets compute cover the link.", "N"
    )
    micro_batch: int | None = option(None, "Sequences of a micro-batch. Default: the fastest.", "N")
    head_pieces: int | None = option(
        None, "Pieces of the vocabulary in which the head computes its loss. Default: whole.", "N"
    )
    activations: str | None = option(
        None,
        "What every segment does with what its forward saves: recompute, keep (on the device) or "
        "offload (to the host). Default: what is best for each.",
        "CHOICE",
    )
    precision: str = option(
        AUTO,
        "fp32, bf16 or fp16, the last two with exact float32 masters; auto: bf16 where the GPU has "
        "it in hardware, else fp16, else fp32.",
        "TYPE",
    )
    gradient_dtype: str | None = option(
        None, "float32: gradients of a model of 16 bits in 32. Default: as the parameters.", "TYPE"
    )
    optimizer: str = option(
        "adamw",
        "adamw, adamw-bfloat16 or adamw-int8 (smaller moments), muon or sgd; adamw-split or "
        "adamw-bfloat16-split: with --precision bf16, 2 bytes of host memory a parameter less.",
        "NAME",
    )
    clip_norm: float = option(
        1.0, "Norm to which gradients are clipped; 0: not at all, so that no update waits.", "NORM"
    )
    spend_gradients: bool = option(
        False, "Gradients wait on the host for their own update only; with --clip-norm 0."
    )
    lora: str | None = option(
        None, "Train adapters of a frozen model, as --lora of atom train: r=16,bits=4.", "SETTINGS"
    )
    tf32: bool = option(
        False, "Matrix products in TF32, as torch.set_float32_matmul_precision('high') gives."
    )
    machine: Path | None = option(
        None, "Link, host and budgets from this file; compute is the GPU's.", "FILE"
    )
    save: Path | None = option(None, "Write the machine to a file that --machine takes.", "FILE")
    picture: Path | None = option(None, "Draw the timeline of a step as a PNG picture.", "FILE")
    trace: Path | None = option(
        None, "Write the timeline of a step as a trace for ui.perfetto.dev.", "FILE"
    )
    profile_again: bool = option(False, "Measure this machine anew, whatever was measured before.")
    json: bool = option(False, "Print exactly one JSON object instead of a table.")

    def __post_init__(self) -> None:
        check_counts(self, "context", "micro_batch", "head_pieces")
        check_counts(self, "tokens_per_step", most=1 << 53)
        check_counts(self, "devices", most=1024)
        check_norm("--clip-norm", self.clip_norm)
        if self.spend_gradients:
            check_spending(self.clip_norm, self.precision)
        memory_of(self)
        if self.machine is not None and not self.machine.is_file():
            raise ConfigError(f"--machine {self.machine}: there is no such file; check the path")
        if self.on_disk is not None and self.disk is None:
            raise ConfigError(f"--on-disk {self.on_disk} needs --disk DISK")
        if self.lora is not None:
            from atomtrain.models.lora_config import parse_lora

            parse_lora(self.lora)
        if self.profile_again and self.gpu is not None:
            raise ConfigError(
                f"--profile-again measures this machine, not {self.gpu}; leave --gpu out"
            )
        if self.activations not in (None, *_ACTIVATIONS):
            raise ConfigError(
                f"--activations {self.activations!r} does not exist; choose "
                f"{choices(str(self.activations), _ACTIVATIONS)}"
            )
        if self.tf32 and self.precision not in (AUTO, "fp32"):
            raise ConfigError("--tf32 is a way to multiply float32; leave it out with --precision")
        if self.tf32 and self.gpu is None:
            raise ConfigError("--tf32 needs --gpu NAME: this machine is measured as torch is set")


def run(arguments: Sequence[str]) -> int:
    options = parse(
        PlanOptions,
        arguments,
        prog="atom plan",
        about="Say how a model would train on a machine, how fast, and what would be faster.",
        examples=_EXAMPLES,
        positional=("model",),
        advice=_ADVICE,
    )
    _check(options)
    with leaving_at_once():
        from atomtrain.files import require_writable
        from atomtrain.planning.advice import Setting
        from atomtrain.planning.plan.machine import save_machine
        from atomtrain.training.config.optimizing import (
            gradient_dtype_of,
            named_optimizer,
            precision_of,
        )
        from atomtrain.views.plans.report import make_report
        from atomtrain.views.plans.table import plan_text

    # What can be refused is refused before the model is analysed.
    for name in ("save", "picture", "trace"):
        require_writable(getattr(options, name), f"--{name}")
    options = _resolved(options)
    place = _place(options)
    if options.disk is not None:
        machine = _with_disk(place.machine, options.disk, again=options.profile_again)
        place = place._replace(machine=machine)
    model = _subject(options).trained_with(
        lambda owned: named_optimizer(owned, options.optimizer, options.precision),
        precision_of(options.precision),
        gradient_dtype_of(options.gradient_dtype),
        place.updates,
    )
    dtype = "tf32" if options.tf32 else options.precision
    workload = _workload(options, model.context_tokens)
    setting = Setting(machine=place.machine, workload=workload, card=place.card, dtype=dtype)
    if options.save is not None:
        save_machine(place.machine, options.save)
    report = make_report(model, setting, place.local)
    _warn(model, place)
    _draw(options, report)
    text = json.dumps(report.to_json(), allow_nan=False) if options.json else plan_text(report)
    sys.stdout.write(text.rstrip("\n") + "\n")
    return 0


def _check(options: PlanOptions) -> None:
    """Refuse names that do not exist, before anything heavy is imported.

    Raises:
        ConfigError: one does not.
    """
    check_model_name(options.model)
    check_model_place(options.model)
    if options.gpu is not None:
        check_gpu_name(options.gpu)
    check_gradient_dtype(options.gradient_dtype)
    check_optimizer(options.optimizer)
    check_precision_choice(options.precision)
    if options.precision != AUTO:
        check_precision(options.precision, options.optimizer)


def _workload(options: PlanOptions, context_tokens: int) -> Workload:
    from atomtrain.planning.search.batch_search import Workload

    return Workload(
        context_tokens=context_tokens,
        tokens_per_step=options.tokens_per_step,
        micro_batch=options.micro_batch,
        disk=options.disk is not None,
        on_disk=options.on_disk,
        clips=bool(options.clip_norm) or options.precision == "fp16",
        spends=options.spend_gradients,
        activations=cast("Activation | None", options.activations),
        devices=options.devices,
    )


def _warn(model: Subject, place: Place) -> None:
    from atomtrain.engine.calibration.profiling import crowding_warning

    images = model.images_left_out
    told = (
        crowding_warning(place.crowded_share),
        None if images is None else f"images are not counted: {images}",
        model.left_wide,
    )
    for warning in filter(None, told):
        sys.stderr.write(f"warning: {warning}\n")


def _draw(options: PlanOptions, report: Report) -> None:
    """Write the step as a picture and as a trace, where that is asked for."""
    if options.picture is not None:
        from atomtrain.views.plans.step import step_picture
        from atomtrain.views.plans.table import caption

        step_picture(report.prospect.spans, caption(report), options.picture)
    if options.trace is not None:
        from atomtrain.views.plans.step import Account, write_trace

        about = {"model": report.model, "machine": report.setting.machine.name}
        write_trace(options.trace, [Account("predicted", report.prospect.spans)], about)


def _resolved(options: PlanOptions) -> PlanOptions:
    """Return the options with the precision that `auto` stands for.

    Raises:
        ConfigError: the optimizer, or how gradients are kept, cannot be with it.
    """
    from atomtrain.engine.devices.native import native_precision
    from atomtrain.planning.catalogue import gpu

    if options.precision != AUTO:
        return options
    here = options.gpu is None
    precision = native_precision("auto") if here else gpu(str(options.gpu)).native_precision
    options = dataclasses.replace(options, precision="fp32" if options.tf32 else precision)
    check_precision(options.precision, options.optimizer)
    return options


def _place(options: PlanOptions) -> Place:
    """Return the machine that the options name: catalogue, file, or this one."""
    from atomtrain.planning.catalogue import gpu, host, machine_for
    from atomtrain.planning.plan.machine import load_machine
    from atomtrain.views.plans.subject import Place, this_place

    card = None if options.gpu is None else gpu(options.gpu)
    budgets = memory_of(options)
    machine = None if options.machine is None else load_machine(options.machine)
    if card is None:
        clips = bool(options.clip_norm) and options.precision != "fp16"
        place = this_place(
            budgets.get("device_memory_bytes"),
            options.precision,
            clips=clips,
            again=options.profile_again,
        )
        machine = machine or place.machine
    else:
        host_bytes = budgets.get("host_memory_bytes", host(card.host).most_memory_bytes)
        device_bytes = budgets.get("device_memory_bytes")
        place = Place(machine_for(card, host_bytes, device_memory_bytes=device_bytes), card)
    return place._replace(machine=dataclasses.replace(machine or place.machine, **budgets))


def _subject(options: PlanOptions) -> Subject:
    """Return the model that the options name, with its images and adapters."""
    from atomtrain.models.lora_config import parse_lora
    from atomtrain.views.plans.subject import subject

    model = subject(options.model, options.context, options.head_pieces)
    if options.data:
        pictured = pictured_in(options.model, options.data, model.context_tokens)
        model = dataclasses.replace(model, pictured=pictured, images_left_out=None)
    if options.lora is not None:
        model = model.with_adapters(parse_lora(options.lora))
    return model


def pictured_in(name: str, data: Sequence[str], context: int) -> Pictured:
    """Return micro-batches with the largest images of data, for the model of a name.

    Raises:
        ConfigError: the model is not a folder of one that reads images.
        DataError: the data cannot be read, or have no images.
    """
    from atomtrain.data.tokenizer import read_tokenizer
    from atomtrain.models.hugging_face import is_hugging_face, model_folder, read_config
    from atomtrain.training.setup.texts import read_text
    from atomtrain.views.plans.pictured import Pictured

    texts = "texts are planned by --context alone; leave --data out"
    if not is_hugging_face(name):
        raise ConfigError(f"{name} reads texts, and {texts}")
    folder = model_folder(name, weights=False)
    sizes = read_config(folder)
    if not sizes.reads_images:
        raise ConfigError(f"{name} reads texts, and {texts}")
    text = read_text(data, sizes, read_tokenizer(folder))
    if not text.sees_images:
        raise ConfigError(f"{text.named} has no images, and {texts}")
    return Pictured(lambda count: text.largest(context, count), f"the largest of {text.named}")


def _with_disk(machine: Machine, text: str, *, again: bool) -> Machine:
    """Return the machine with a disk of the catalogue, or with that of a folder, measured."""
    from atomtrain.engine.calibration.disk_profile import disk_rates
    from atomtrain.planning.catalogue import DISKS, disk

    folder = Path(text)
    if text.lower() in DISKS or not folder.is_dir():
        return disk(text).of(machine)
    return disk_rates(folder, measure="again" if again else True).of(machine)
