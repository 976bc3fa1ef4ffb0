"""`atom evaluate`: held-out loss, perplexity and bits per byte of a trained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomtrain.cli.parsing import check_checkpoint, parse
from atomtrain.settings import check_counts, option

_EXAMPLES = """\
  atom evaluate runs/mine/peer-0
  atom evaluate runs/mine/peer-0 --data chats.jsonl --json
  atom evaluate my-model --data 'books/*.txt' --context 512"""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What a user can say to `atom evaluate`."""

    checkpoint: Path = option(
        None,
        "A checkpoint, or the folder of a peer, of a Hugging Face model or of adapters.",
        "CHECKPOINT",
    )
    data: str | None = option(
        None, "As --data of atom train; its held-out part counts. Default: the run's.", "FILES"
    )
    context: int | None = option(None, "Tokens of a sequence. Default: the run's, or 1024.", "N")
    sequences: int = option(64, "Sequences to evaluate at most.", "N")
    json: bool = option(False, "Print exactly one JSON object.")

    def __post_init__(self) -> None:
        check_counts(self, "context", "sequences")


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        EvaluateOptions,
        arguments,
        prog="atom evaluate",
        about="Evaluate a trained model on text or answers that were held out.",
        examples=_EXAMPLES,
        positional=("checkpoint",),
    )
    check_checkpoint(options.checkpoint)
    from atomtrain.training.tools.evaluation import ClassEvaluation, PairEvaluation, evaluate

    found = evaluate(options.checkpoint, options.data, options.context, options.sequences)
    if options.json:
        sys.stdout.write(json.dumps(found._asdict()) + "\n")
    elif isinstance(found, ClassEvaluation):
        sys.stdout.write(
            f"loss            {found.loss:.4f} nats a text\n"
            f"accuracy        {found.accuracy:.1%} of {found.texts} texts\n"
        )
    elif isinstance(found, PairEvaluation):
        sys.stdout.write(
            f"loss            {found.loss:.4f} nats a pair\n"
            f"preferred       {found.reward_accuracy:.1%} of {found.pairs} pairs\n"
        )
        if found.reward_margin is not None:
            sys.stdout.write(f"margin          {found.reward_margin:.4f} nats\n")
    else:
        sys.stdout.write(
            f"loss            {found.loss:.4f} nats a token\n"
            f"perplexity      {found.perplexity:.3f}\n"
            f"bits per byte   {found.bits_per_byte:.4f}\n"
            f"targets         {found.targets} tokens in {found.sequences} sequences of "
            f"{found.context}\n"
        )
    return 0
