"""The recipe: everything that decides what is trained, resolved and serialisable.

It travels in checkpoints and in the swarm's manifest, so that resuming and joining need no options.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from atomtrain.errors import CheckpointError, ConfigError, nearest
from atomtrain.models.lora_config import LoraConfig, parse_lora
from atomtrain.optimizers.schedules import Schedule, check_kind
from atomtrain.settings import Check, check_seed, count, number, one_of, option
from atomtrain.training.config.optimizing import (
    GRADIENT_DTYPES,
    check_gradient_dtype,
    check_optimizer,
    check_precision,
    check_precision_choice,
)

if TYPE_CHECKING:
    from atomtrain.models.making import Sizes

FORMAT = 1
FIXED, MAY_CHANGE, EACH_PEER = "fixed", "may change", "each peer's own"
"""What who resumes or joins may say of a field; of the last kind only who joins may."""
OBJECTIVES = ("next-token", "dpo", "simpo", "orpo", "kto", "reward", "classify", "embed")
PREFERENCES = OBJECTIVES[1:5]
"""Those that teach what to prefer, from pairs of answers; KTO's are an answer and one of another
row."""
_MOST = 2**63 - 1
_MOST_CONTEXT, _MOST_SEQUENCES = 1 << 31, 1 << 20
_PLAIN = {"str": str, "bool": bool}


def _named(check: Callable[[str], object]) -> Check:
    """Return a check whose message says itself what is wrong."""
    return lambda _, value: check(value)


check_norm = number(lambda norm: 0 <= norm < math.inf, "a norm, or 0 for no clipping", "g")
check_share = number(lambda share: 0 <= share < 1, "at least 0 and below 1")


def _check_gradient_dtype(flag: str, name: str) -> None:
    if name not in GRADIENT_DTYPES:
        raise ConfigError(
            f"{flag} takes {' or '.join(GRADIENT_DTYPES)}, not "
            f"{name!r}.{nearest(name, GRADIENT_DTYPES)} Leave it out for gradients as the "
            "parameters are: of 16 bits with --precision bf16 or fp16"
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how.

    Fields with a help text are options of `atom train`. `least` bounds what a recipe may hold, and
    `on_resume` says whether who resumes or joins may give another value.
    """

    model: str = option(
        MISSING,
        "Model by name, from tiny and demo to gpt3-175b; or the folder or id of a Hugging Face "
        "model (pip install 'atomtrain[hf]'), which is trained further. Default: demo.",
        "NAME",
        on_resume=FIXED,
    )
    sizes: Sizes
    """The model's sizes; the tokenizer has at most `vocabulary` tokens."""
    context: int = option(
        MISSING, "Tokens of a sequence.", "N", check=count(), on_resume=FIXED, least=1
    )
    sequences: int = option(
        MISSING,
        "Sequences of one step.",
        "N",
        check=count(most=_MOST_SEQUENCES),
        on_resume=MAY_CHANGE,
        least=1,
    )
    steps: int = option(
        MISSING, "Optimizer steps of each peer.", "N", check=count(), on_resume=MAY_CHANGE, least=0
    )
    learning_rate: float = option(
        MISSING,
        "Peak learning rate.",
        "RATE",
        check=number(lambda rate: 0 < rate < 10, "above 0 and below 10"),
        on_resume=MAY_CHANGE,
        least=0,
    )
    warmup_steps: int = option(
        MISSING,
        "Steps in which the learning rate rises linearly from 0. Default: a tenth of all, 50 at "
        "most.",
        "N",
        check=count(0),
        on_resume=FIXED,
        least=0,
    )
    weight_decay: float = option(
        MISSING,
        "What is taken off matrices each step, as a part of the learning rate. Default: 0.1, or 0 "
        "for a model that was trained before.",
        "NUMBER",
        check=check_share,
        on_resume=FIXED,
        least=0,
    )
    layer_lr_decay: float = option(
        1.0,
        "By what a layer's learning rate is that of the layer above, such as 0.9: layers nearer "
        "the input learn more slowly. Default: 1, all alike.",
        "NUMBER",
        check=number(lambda decay: 0 < decay <= 1, "above 0 and at most 1, such as 0.9"),
        on_resume=FIXED,
        least=0,
    )
    clip_norm: float = option(
        1.0,
        "Global norm to which gradients are clipped, exactly. 0: not at all, and no update waits "
        "for the gradients of others. Default: 1.",
        "NORM",
        check=check_norm,
        on_resume=FIXED,
        least=0,
    )
    seed: int = option(
        0,
        "Seed of weights, sample order and dropout.",
        "N",
        check=check_seed,
        on_resume=FIXED,
        least=0,
    )
    local_steps: int = field(metadata={"least": 0, "on_resume": MAY_CHANGE})
    """Steps in which every part of the model is averaged with other peers once; 0: as few as the
    link allows. See `Rules`."""
    evaluate_every: int = option(
        MISSING,
        "Steps between evaluations on held-out text.",
        "N",
        check=count(),
        on_resume=MAY_CHANGE,
        least=1,
    )
    checkpoint_every: int = option(
        MISSING, "Steps between checkpoints.", "N", check=count(), on_resume=MAY_CHANGE, least=1
    )
    optimizer: str = option(
        "adamw",
        "adamw, adamw-bfloat16 or adamw-int8 (smaller moments), muon or sgd; adamw-split or "
        "adamw-bfloat16-split: with --precision bf16, 2 bytes of host memory a parameter less, "
        "with the same bits. Default: adamw.",
        "NAME",
        check=_named(check_optimizer),
        on_resume=FIXED,
    )
    schedule: str = option(
        "cosine",
        "Learning rate after the warm-up: cosine, linear, constant or wsd (constant, then a decay"
        " in the last fifth). Default: cosine.",
        "NAME",
        check=_named(check_kind),
        on_resume=MAY_CHANGE,
    )
    neftune_noise_alpha: float = option(
        0.0,
        "NEFTune: noise on the embeddings while training, by this number; 5 to 15 are usual. "
        "Default: 0, none.",
        "ALPHA",
        check=number(lambda alpha: 0 <= alpha < math.inf, "at least 0, such as 5", "g"),
        on_resume=FIXED,
        least=0,
    )
    packed: bool = option(
        False,
        "Put several rows of data into one sequence. Neither they nor documents of running text "
        "see each other then.",
        "",
    )
    lora: LoraConfig | None = option(
        None,
        "Freeze the model and train adapters: r=8,alpha=16,targets=q_proj+v_proj (or all-linear, "
        "the default; all-linear+experts), dora=true, rslora=true, dropout=0.05, "
        "init=pissa, pissa_niter_16 or olora to begin with the main part of each matrix, "
        "bits=8 or 4 to hold frozen linear layers and experts in so many bits, and "
        "modules_to_save=embed_tokens+lm_head to train these modules themselves.",
        "SETTINGS",
        check=_named(parse_lora),
        on_resume=FIXED,
    )
    train_tower: bool = option(
        False,
        "Of a model that reads images: train what looks at them too, which else stays as it is.",
        "",
    )
    precision: str = option(
        "fp32",
        "fp32, or bf16 or fp16: 16 bits on the link and in compute, with exact float32 masters on"
        " the host; with fp16 the loss is scaled. Who joins may choose another than the founder's."
        " Default: auto: bf16 where the device has it in hardware, fp16 on older GPUs, else fp32.",
        "NAME",
        check=_named(check_precision_choice),
        on_resume=EACH_PEER,
    )
    gradient_dtype: str | None = option(
        None,
        "float32: gradients of a model of 16 bits add up, cross the link and wait on the host in "
        "32. Default: as the parameters, so of 16 bits with --precision bf16 or fp16.",
        "TYPE",
        check=_check_gradient_dtype,
        on_resume=FIXED,
    )
    objective: str = option(
        OBJECTIVES[0],
        "What is learnt: next-token; to prefer the better of two answers (rows with chosen and "
        "rejected): dpo, simpo or orpo; or to give good answers (rows with prompt, completion and "
        "label): kto; or, with a head of its own, how good answers are (chosen and rejected): "
        "reward; or of which class a text is (text and label): classify; or embeddings, by which a "
        "query finds its text among those of the micro-batch (query and positive): embed. Default: "
        "next-token.",
        "NAME",
        check=one_of(OBJECTIVES),
        on_resume=FIXED,
    )
    beta: float = option(
        0.1,
        "With --objective dpo or kto: how strongly the model is held to what it was; with simpo: "
        "how much a difference of two answers counts; with orpo: the weight of the preference "
        "beside the next token. Default: 0.1, with simpo 2.",
        "NUMBER",
        check=number(lambda beta: 0 < beta < math.inf, "above 0, such as 0.1"),
        on_resume=FIXED,
        least=0,
    )
    gamma: float = option(
        1.0,
        "With --objective simpo: the reward by which the better answer is to lead. Default: 1.",
        "NUMBER",
        check=number(lambda gamma: 0 <= gamma < math.inf, "at least 0, such as 1"),
        on_resume=FIXED,
        least=0,
    )

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_objective()
        self._check_images()
        check_optimizer(self.optimizer)
        check_precision(self.precision, self.optimizer)
        check_gradient_dtype(self.gradient_dtype)
        self._schedule()

    @property
    def in_pairs(self) -> bool:
        """Whether sequences come in twos: a better and another answer, or a query and its text."""
        return self.objective in (*PREFERENCES, "reward", "embed")

    @property
    def has_head(self) -> bool:
        """Whether a head that says something of a whole sequence is in the place of the usual."""
        return self.objective in ("reward", "classify")

    @property
    def says_text(self) -> bool:
        """Whether the model predicts tokens."""
        return not self.has_head and self.objective != "embed"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the model as it was before the first step."""
        return self.objective in ("dpo", "kto")

    @property
    def learns(self) -> Literal["answers", "pairs", "labels", "classes", "matches"]:
        """What rows of data must say."""
        if self.objective == "embed":
            return "matches"
        if self.objective == "classify":
            return "classes"
        if self.objective == "kto":
            return "labels"
        return "pairs" if self.in_pairs else "answers"

    @property
    def reads_images(self) -> bool:
        """Whether the model takes images beside text."""
        return bool(getattr(self.sizes, "reads_images", False))

    @property
    def needs_images(self) -> bool:
        """Whether all rows have images."""
        return bool(getattr(self.sizes, "needs_images", False))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step of one peer."""
        return self.sequences * self.context

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0.

        By default linear warm-up, then a cosine to a tenth of the peak (Hoffmann et al. 2022,
        section 3).
        """
        return self.learning_rate * self._schedule()(step)

    def _schedule(self) -> Schedule:
        # A run that is resumed may have fewer steps than its warm-up.
        warmup_steps = min(self.warmup_steps, self.steps)
        return Schedule(kind=self.schedule, steps=self.steps, warmup_steps=warmup_steps, final=0.1)

    def _check_numbers(self) -> None:
        """Refuse what no run has: a recipe may come from a founder."""
        for declared in dataclasses.fields(self):
            least, number = declared.metadata.get("least"), getattr(self, declared.name)
            if declared.type in _PLAIN and not isinstance(number, _PLAIN[str(declared.type)]):
                raise ConfigError(f"{declared.name} must be a {declared.type}, not {number!r:.40}")
            if least is None:
                continue
            given = str(number)[:40]
            if declared.type == "int" and not (
                isinstance(number, int) and least <= number <= _MOST
            ):
                raise ConfigError(
                    f"{declared.name} must be a whole number from {least} to {_MOST}, not {given}"
                )
            if not isinstance(number, int | float) or not least <= number < math.inf:
                raise ConfigError(f"{declared.name} must be a number from 0 on, not {given}")

    def _check_objective(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"--objective takes {' or '.join(OBJECTIVES)}, not {self.objective}")
        if self.lora is not None and not hasattr(self.sizes, "config"):
            raise ConfigError("--lora adapts a trained model; the recipe has one that begins anew")
        if self.context > _MOST_CONTEXT or self.sequences > _MOST_SEQUENCES:
            raise ConfigError(
                f"a sequence has at most {_MOST_CONTEXT} tokens, a step {_MOST_SEQUENCES} "
                f"sequences; not {self.context} and {self.sequences}"
            )
        if self.in_pairs and self.sequences % 2:
            raise ConfigError(
                f"--sequences {self.sequences} is odd, but with --objective {self.objective} every "
                "pair takes two; give an even number"
            )
        if self.packed and self.objective != OBJECTIVES[0]:
            what = "text" if self.objective in ("classify", "embed") else "answer"
            raise ConfigError(
                "--packing puts several rows into one sequence, but with --objective "
                f"{self.objective} every {what} has its own; leave it out"
            )

    def _check_images(self) -> None:
        if self.train_tower and not self.reads_images:
            raise ConfigError(
                f"--train-tower is for models that read images, which {self.model} is not; leave "
                "it out"
            )
        if self.needs_images and self.packed:
            raise ConfigError("--packing is for texts, and the model reads images; leave it out")
        if self.needs_images and self.objective != OBJECTIVES[0]:
            raise ConfigError(
                f"--objective {self.objective} is for texts, and {self.model} reads images; leave "
                "it out"
            )

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Recipe:
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: of another format, or not a recipe.
        """
        from atomtrain.models.making import sizes_from_json

        try:
            fields = dict(data)
            if (found := fields.pop("format")) != FORMAT:
                raise CheckpointError(
                    f"the recipe has format {found}, this version reads {FORMAT}; "
                    "use the version of atomtrain that wrote it"
                )
            if fields.get("lora") is not None:
                fields["lora"] = LoraConfig.from_json(fields["lora"])
            return cls(**{**fields, "sizes": sizes_from_json(fields["sizes"])})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not a recipe of atomtrain: {error}") from error


def check_spending(clip_norm: float, precision: str, *, averaged: bool = False) -> None:
    """Refuse to spend gradients at once where they are wanted again.

    Raises:
        ConfigError: they wait for their norm, for overflows, or for other peers'.
    """
    waits = None
    if clip_norm:
        waits = f"for the norm to which they are clipped, {clip_norm:g}; give --clip-norm 0"
    elif precision == "fp16":
        waits = "till none has overflowed, with --precision fp16; choose bf16 or fp32"
    elif averaged:
        waits = "for those of other peers; choose --average local"
    if waits is not None:
        raise ConfigError(f"--spend-gradients cannot be: gradients wait {waits}, or leave it out")
