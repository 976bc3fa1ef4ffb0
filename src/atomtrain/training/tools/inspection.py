"""What training data come to with a model's tokenizer: counts, and examples with marked answers."""

from __future__ import annotations

import itertools
from typing import Any

from atomtrain.data import Tokenizer, read_tokenizer
from atomtrain.data.examples import Part
from atomtrain.data.material import ExampleMaterial, PairMaterial, TextMaterial
from atomtrain.data.sampler import windows_per_epoch
from atomtrain.models import Sizes, preset
from atomtrain.models.hugging_face import is_hugging_face, model_folder, read_config
from atomtrain.training.setup.texts import has_pairs, read_text

_SHOWN_TOKENS = 200


def inspect(
    data: str, model: str, context: int, *, packed: bool = False, samples: int = 1
) -> dict[str, Any]:
    """Return plain JSON values: counts, and `samples`, texts with answers in double brackets.

    Raises:
        AtomError: data or model cannot be read; names file and line.
    """
    sizes, tokenizer = _known_of(model)
    text = read_text(
        [data], sizes, tokenizer, packed=packed, learns="pairs" if has_pairs([data]) else "answers"
    )
    tokenizer, [material] = text.tokenizer, text.material.sources
    if isinstance(material, TextMaterial):
        tokens = material.tokens
        shown = tokens.train[:_SHOWN_TOKENS].tolist()
        return {
            "kind": "text",
            "train_tokens": len(tokens.train),
            "held_out_tokens": len(tokens.held_out),
            "train_bytes": tokens.train_bytes,
            "skipped_rows": text.skipped_rows,
            "sequences": windows_per_epoch(len(tokens.train), context),
            # Both parts need a sequence, and the last one's label.
            "longest_context": max(0, min(len(tokens.train), len(tokens.held_out)) - 1),
            "samples": [tokenizer.decode(shown)][:samples],
        }
    assert isinstance(material, ExampleMaterial | PairMaterial)
    if isinstance(material, PairMaterial):
        found = _pairs(material, tokenizer, context, samples)
        return {**found, "skipped_rows": text.skipped_rows}
    examples = material.examples
    rows = material.train(context)
    return {
        "kinds": examples.counts.kinds,
        "skipped_rows": text.skipped_rows,
        "examples": examples.counts.examples,
        "held_out": examples.held_out.count,
        "tokens": examples.counts.tokens,
        "answer_tokens": examples.counts.answer_tokens,
        "longest_tokens": examples.counts.longest_tokens,
        "sequences": len(rows),
        "cut": rows.cut,
        "dropped": rows.dropped,
        "filled_share": round(rows.laid.filled_share, 4),
        "samples": [
            _marked(examples.train, index, tokenizer)
            for index in range(min(samples, examples.train.count))
        ],
    }


def _known_of(model: str) -> tuple[Sizes, Tokenizer | None]:
    """Return a model's sizes and tokenizer; a preset has none yet: it is trained on the text."""
    if not is_hugging_face(model):
        return preset(model), None
    folder = model_folder(model, weights=False)
    sizes, tokenizer = read_config(folder), read_tokenizer(folder)
    tokenizer.check_room(sizes.vocabulary, str(folder))
    return sizes, tokenizer


def _pairs(
    material: PairMaterial, tokenizer: Tokenizer, context: int, samples: int
) -> dict[str, Any]:
    examples, rows = material.examples, material.train(context)
    shown = range(min(2 * samples, examples.train.count))
    return {
        "kinds": {kind: count // 2 for kind, count in examples.counts.kinds.items()},
        "pairs": examples.counts.examples // 2,
        "held_out": examples.held_out.count // 2,
        "tokens": examples.counts.tokens,
        "answer_tokens": examples.counts.answer_tokens,
        "longest_tokens": examples.counts.longest_tokens,
        "sequences": 2 * len(rows),
        "cut": rows.cut,
        "dropped": rows.dropped,
        "samples": [
            ("rejected: " if index % 2 else "chosen: ") + _marked(examples.train, index, tokenizer)
            for index in shown
        ],
    }


def _marked(part: Part, index: int, tokenizer: Tokenizer) -> str:
    start, stop = int(part.starts[index]), int(part.starts[index + 1])
    stop = min(stop, start + _SHOWN_TOKENS)
    pairs = zip(part.tokens[start:stop].tolist(), part.answers[start:stop].tolist(), strict=True)
    pieces = []
    for answer, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run])
        pieces.append(f"[[{text}]]" if answer else text)
    return "".join(pieces)
