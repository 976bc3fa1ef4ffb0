"""`Trainer`: a model, a data set and a device budget; for whoever does not want a loop of his own.

The arguments are those of `transformers.Trainer` where both have them, so that a script written
for it needs a few lines changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.checkpoint import Checkpoint, load_latest, open_checkpoint, save
from atomtrain.checkpoint.reader import CHECKPOINTS_FOLDER
from atomtrain.engine.api import swap
from atomtrain.engine.calibration.profile_cache import StepTimes
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.devices import open_devices
from atomtrain.engine.engine import Engine
from atomtrain.engine.options import Options
from atomtrain.engine.updates.optimizer import OptimizerFactory
from atomtrain.errors import CheckpointError, ConfigError
from atomtrain.events import EVENTS_FILE, EventLog
from atomtrain.models.neftune import with_noise
from atomtrain.optimizers import AdamW, decay_groups, layer_groups
from atomtrain.optimizers.groups import set_learning_rate
from atomtrain.training.config.optimizing import precision_of
from atomtrain.training.setup.state import (
    compiled_before,
    compiling_of,
    counts_of,
    loss_scale_of,
    plan_before,
    restore,
    shards_of,
)
from atomtrain.training.trainer.callbacks import Callback, Course, Progress, tell_start, tell_step
from atomtrain.training.trainer.inline import Inline, in_notebook
from atomtrain.training.trainer.targets import first_target, targets_in
from atomtrain.training.trainer.trainer_arguments import (
    EPOCH,
    TrainerArguments,
    arguments_from,
    names_in_forward,
    only,
    stacked,
    tokens_in,
)
from atomtrain.views.runs.picture import History, PlanView
from atomtrain.views.runs.plan_event import tell_checkpoint, tell_prediction, tell_timeline

Collate = Callable[[list[Any]], Any]
_OF_ADAMW = {
    "layer_lr_decay": "its groups an lr_factor each",
    **dict.fromkeys(["weight_decay", "betas", "epsilon"], "it to the optimizer"),
}
"""Arguments that an optimizer of the caller's knows nothing of, and where they go then."""


class Trainer:
    """Trains `model` on `train_dataset` within a device budget.

    >>> import torch, atomtrain
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> data = [(torch.ones(4), torch.ones(1))] * 8
    >>> trainer = atomtrain.Trainer(
    ...     model,
    ...     args=atomtrain.TrainerArguments(output_dir=folder, micro_batch=4, epochs=2),
    ...     train_dataset=data,
    ...     loss=lambda output, batch: (output - batch[1]).pow(2).mean(),
    ...     device="emulated", device_memory="1MiB",
    ... )
    >>> history = trainer.train()
    >>> len(history.losses)
    4
    """

    def __init__(  # noqa: PLR0913 - those of transformers.Trainer, and where to train
        self,
        model: nn.Module,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        data_collator: Collate | None = None,
        processing_class: Any = None,
        optimizer: OptimizerFactory | None = None,
        loss: Callable[..., Tensor] | None = None,
        callbacks: Sequence[Callback] = (),
        device_memory: str | int | None = None,
        device: str = "auto",
    ) -> None:
        """Take everything down; nothing is computed yet.

        Args:
            model: Any module; it is put into training mode.
            args: `TrainerArguments`, `transformers.TrainingArguments`, or `None` for defaults.
            train_dataset: Samples by index, with a length. Each micro-batch must have the same
                shapes: pad or cut samples to one length.
            eval_dataset: The same, to evaluate on.
            data_collator: Makes a micro-batch of a list of samples; `None` stacks tensors.
            processing_class: Tokenizer or the like, which is written beside the model.
            optimizer: Gets the trainable parameters, returns the optimizer; `None` is AdamW. A
                group with `lr_factor` learns with so much of the learning rate.
            loss: As in `atomtrain.swap`; `None` takes the output's `.loss`.
            callbacks: Told what happens.
            device_memory: Budget such as `"20GiB"`; `None`: most of what the device has.
            device: As in `atomtrain.swap`.

        Raises:
            ConfigError: arguments that cannot be, or too little data for a single step.
        """
        self.model = model
        self.args: TrainerArguments = arguments_from(args)
        if optimizer is not None and isinstance(args, TrainerArguments):
            _refuse_of_adamw(args)
        self._train, self._evaluation = train_dataset, eval_dataset
        self._collate = data_collator or stacked
        drop = self.args.drop_unused and loss is None
        self._taken = names_in_forward(model) if drop else None
        self._first_target = first_target(model) if loss is None else None
        self._processing = processing_class
        self._swap = partial(swap, optimizer=optimizer or self._adamw, loss=loss)
        self._open_devices = partial(open_devices, device, device_memory)
        self._callbacks = tuple(callbacks)
        self._compile = self.args.compile
        self._plan: Mapping[str, Any] | None = None
        self._engine: Engine | None = None
        self.course = Course()
        self._check_size()
        if self.args.log_every is not None:
            self._callbacks += (Progress(self._steps_of(self.args.log_every)),)
        if in_notebook():
            self._callbacks += (Inline(),)

    @property
    def engine(self) -> Engine:
        """The engine, open from the first use on."""
        if self._engine is None:
            self._open(self._open_devices())
        assert self._engine is not None
        return self._engine

    @property
    def plan(self) -> PlanView:
        """The plan, which a notebook shows as a picture."""
        return PlanView(self.engine)

    @property
    def history(self) -> History:
        """The losses so far, which a notebook shows as a picture."""
        return History(self.course.losses, self.course.evaluations)

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> History:
        """Train to the end, or until a callback stops it; return the losses.

        Args:
            resume_from_checkpoint: `True` goes on from the newest checkpoint in `output_dir`, a
                path from that checkpoint; the result is that of a training that was never
                interrupted, bit for bit.

        Raises:
            CheckpointError: there is no checkpoint to go on from, or it is of another model.
            ConfigError: this trainer has done all steps; one that was stopped goes on.
        """
        course, args = self.course, self.args
        folder = Path(args.output_dir)
        course.steps = args.max_steps or max(1, int(args.epochs * self._steps_an_epoch))
        course.stop = False
        if resume_from_checkpoint:
            self._resume(folder, resume_from_checkpoint)
        elif course.step >= course.steps:
            raise ConfigError(
                f"all {course.steps} steps are done; make a new Trainer to train on, or anew"
            )
        engine = self.engine
        schedule = args.schedule_of(course.steps)
        events = EventLog(folder / EVENTS_FILE)
        try:
            tell_start(self, events)
            self._tell("on_train_begin")
            second, times = course.step + 2, StepTimes()
            while course.step < course.steps and not course.stop:
                rate = args.learning_rate * schedule(course.step)
                set_learning_rate(engine.optimizer.param_groups, rate)
                torch.manual_seed(args.seed + course.step)
                engine.recording = course.step + 1 == second  # for the dashboard, once
                batches = self._batches(course.step)
                loss = engine.step(batches, targets_in(batches, self._first_target))
                assert engine.last is not None
                times.note(engine.last.step_s)
                course.step += 1
                course.epoch = course.step / self._steps_an_epoch
                course.losses.append(loss)
                tell_step(self, events, loss, tokens_in(batches))
                if engine.recording:
                    tell_timeline(engine, course.step, events)
                self._tell("on_step_end", loss)
                if self._due(args.evaluate_every) and self._evaluation is not None:
                    self._evaluate(events)
                if self._due(args.checkpoint_every):
                    self._save(events, folder)
            if self._evaluation is not None:
                self._evaluate(events)
            self._save(events, folder)
            tell_prediction(engine, times, events)
            reason = "interrupted" if course.stop else "completed"
            events.emit("run_finished", reason=reason, step=course.step)
            self._tell("on_train_end")
        finally:
            events.close()
        return self.history

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Return the mean loss on a data set (the trainer's own if it is `None`) as `eval_loss`.

        As in `transformers`, micro-batches count alike here, and those without a target not at
        all. Samples that fill no micro-batch at the end are left out.

        Raises:
            ConfigError: there is no data set, or it does not fill one micro-batch.
        """
        data = self._evaluation if eval_dataset is None else eval_dataset
        size = self.args.micro_batch
        if data is None or len(data) < size:
            raise ConfigError(
                f"there are not enough samples to evaluate on; give at least {size} (micro_batch)"
            )
        starts = range(0, len(data) - size + 1, size)
        batches = [self._micro_batch(data, range(start, start + size)) for start in starts]
        targets = targets_in(batches, self._first_target)
        counting = None if targets is None else [1 if count else 0 for count in targets]
        return {"eval_loss": self.engine.evaluate(batches, counting)}

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the model: as `save_pretrained` does where the model has it, else safetensors."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        state = self.engine.state_dict()
        write = getattr(self.model, "save_pretrained", None)
        if self._processing is not None:
            self._processing.save_pretrained(str(folder))
        if write is not None:
            write(str(folder), state_dict=state)
            return folder
        from safetensors.torch import save_file

        # Shared weights would be refused: each name gets memory of its own.
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder

    def close(self) -> None:
        """Release device and threads; the model stays usable."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            with_noise(self.model, 0)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _samples(self) -> int:
        return self.args.micro_batch * self.args.micro_batches

    @property
    def _steps_an_epoch(self) -> int:
        return len(self._train) // self._samples

    def _check_size(self) -> None:
        count = 0 if self._train is None else len(self._train)
        if count < self._samples:
            raise ConfigError(
                f"train_dataset has {count} samples; a step takes {self._samples} (micro_batch "
                f"{self.args.micro_batch} times micro_batches {self.args.micro_batches})"
            )

    def _adamw(self, _: list[nn.Parameter]) -> torch.optim.Optimizer:
        args = self.args
        groups = decay_groups(self.model, args.weight_decay)
        groups = layer_groups(self.model, groups, args.layer_lr_decay, args.learning_rate)
        return AdamW(groups, lr=args.learning_rate, betas=args.betas, eps=args.epsilon)

    def _open(self, devices: Sequence[Device]) -> None:
        """Open the engine, on open devices that it then owns."""
        args = self.args
        try:
            with_noise(self.model, args.neftune_noise_alpha or 0).train()
            options = Options(
                micro_batches=args.micro_batches,
                clip_norm=args.clip_norm,
                precision=precision_of(args.precision),
                profile=args.profile,
                compile=self._compile,
                plan=self._plan,
            )
            example = self._batches(0)[0]
            self._engine = self._swap(self.model, example, device=devices, options=options)
        except BaseException:
            for device in devices:
                device.close()
            with_noise(self.model, 0)
            raise

    def _batches(self, step: int) -> list[Any]:
        """Return the micro-batches of a step: a pure function of the seed and its number."""
        epoch, place = divmod(step, self._steps_an_epoch)
        generator = torch.Generator().manual_seed(self.args.seed + 1_000_003 * epoch)
        order = torch.randperm(len(self._train), generator=generator).tolist()
        mine = order[place * self._samples : (place + 1) * self._samples]
        size = self.args.micro_batch
        groups = (mine[start : start + size] for start in range(0, len(mine), size))
        return [self._micro_batch(self._train, group) for group in groups]

    def _micro_batch(self, data: Any, indices: Iterable[int]) -> Any:
        samples = [data[index] for index in indices]
        if self._taken is not None:
            samples = [only(sample, self._taken) for sample in samples]
        return self._collate(samples)

    def _due(self, every: int | str | None) -> bool:
        if every is None:
            return False
        steps = self._steps_of(every)
        return self.course.step % steps == 0 and self.course.step < self.course.steps

    def _steps_of(self, every: int | str) -> int:
        return self._steps_an_epoch if every == EPOCH else int(every)

    def _evaluate(self, events: EventLog) -> None:
        loss = self.evaluate()["eval_loss"]
        self.course.evaluations.append((self.course.step, loss))
        events.emit("evaluation", step=self.course.step, loss=loss)
        self._tell("on_evaluate", loss)

    def _save(self, events: EventLog, folder: Path) -> None:
        started_s = time.monotonic()
        meta = {
            "losses": self.course.losses,
            "evaluations": self.course.evaluations,
            "tokens": self.course.tokens,
            "loss_scale": loss_scale_of(self.engine),
            "compiling": compiling_of(self.engine),
            "plan": self.engine.kept_plan(),
            "by_targets": self._first_target is not None,
            "counts": counts_of(self.engine),
        }
        path = save(folder / CHECKPOINTS_FOLDER, self.course.step, shards_of(self.engine), meta)
        tell_checkpoint(path, self.course.step, time.monotonic() - started_s, events)
        self._tell("on_save", path)

    def _resume(self, folder: Path, where: bool | str | Path) -> None:
        if isinstance(where, bool):
            checkpoint = load_latest(folder / CHECKPOINTS_FOLDER)
        else:
            checkpoint = open_checkpoint(Path(where))
        self._open_as(checkpoint)
        restore(self.engine, checkpoint)
        try:
            tokens = int(checkpoint.meta.get("tokens", 0))  # older ones did not count them
            losses = [float(loss) for loss in checkpoint.meta["losses"]]
            evaluations = [(int(s), float(loss)) for s, loss in checkpoint.meta["evaluations"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{checkpoint.path} was not written by Trainer; choose another output_dir"
            ) from error
        if not checkpoint.meta.get("by_targets", False):  # in older ones micro-batches count alike
            self._first_target = None
        self.course.step = checkpoint.step
        self.course.losses, self.course.evaluations = losses, evaluations
        self.course.tokens = tokens

    def _open_as(self, checkpoint: Checkpoint) -> None:
        """Have the engine follow a checkpoint's plan, with its layers compiled if they were then.

        Unless somebody asked for the engine before, it opens once, and measures no other way.
        """
        opened = self._engine
        devices = self._open_devices() if opened is None else opened.devices
        try:
            self._plan = plan_before(checkpoint)
            if self.args.compile == "auto":
                self._compile = compiled_before(checkpoint, devices)
        except BaseException:
            for device in devices if opened is None else ():
                device.close()
            raise
        if opened is None:
            self._open(devices)
            return
        compiled, plan = opened.compiling.compiled, opened.kept_plan()
        if self._compile not in ("auto", compiled) or self._plan not in (None, plan):
            self.close()

    def _tell(self, what: str, *about: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, what)(self, self.course, *about)


def _refuse_of_adamw(args: TrainerArguments) -> None:
    for name, instead in _OF_ADAMW.items():
        given = getattr(args, name)
        if given != getattr(TrainerArguments(), name):
            raise ConfigError(
                f"{name}={given} is for Trainer's own AdamW, and an optimizer is given; leave one "
                f"out, or give {instead}"
            )
