"""What a run learns from: running text, or rows with answers, with the tokenizer for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from atomtrain.data import Batch, Tokenizer, default_cache, prepare, read_corpus
from atomtrain.data.chat import ChatTemplate, Encoder
from atomtrain.data.corpus import Corpus, corpus_of_texts
from atomtrain.data.dialogues import NoAnswerError, Plain, is_pair, understand
from atomtrain.data.examples import Examples
from atomtrain.data.material import (
    Batches,
    ExampleMaterial,
    Material,
    PairMaterial,
    TextMaterial,
)
from atomtrain.data.rows import SUFFIXES, Row, has_rows, read_rows
from atomtrain.data.sampler import joined
from atomtrain.errors import DataError
from atomtrain.models import HuggingFaceConfig, Sizes

_Understood = TypeVar("_Understood")
_JUDGED_SEQUENCES = 8
"""Enough to tell poison from chance, few enough to be a small part of a step."""


class Text(NamedTuple):
    """What is trained on."""

    data: str | None
    """As the user named it; `None` is the demo corpus."""
    sha256: str
    tokenizer: Tokenizer
    material: Material
    skipped_rows: int = 0
    """Rows that have no answer."""
    skipped: str | None = None
    """What is to be told of them."""


class _Answered:
    """The rows of data that have an answer; the others are counted."""

    def __init__(self, data: str) -> None:
        self._data = data
        self._rows = self.skipped_rows = 0
        self._first: str | None = None

    def through(self, understood: Callable[[Row], _Understood]) -> Iterator[_Understood]:
        """Yield what each row says.

        Raises:
            DataError: none has an answer.
        """
        for row in read_rows(self._data):
            self._rows += 1
            try:
                said = understood(row)
            except NoAnswerError as error:
                self.skipped_rows += 1
                self._first = self._first or str(error)
            else:
                yield said
        if self._first is not None and self.skipped_rows == self._rows:
            raise DataError(
                f"none of the {self._rows} rows of {self._data} has an answer (the first: "
                f"{self._first}); add answers, or name other files with --data"
            )

    @property
    def told(self) -> str | None:
        """One line for the user, if rows were skipped."""
        if self._first is None:
            return None
        return (
            f"{self.skipped_rows} of {self._rows} rows of {self._data} have no answer and are "
            f"skipped (the first: {self._first})"
        )


def read_text(
    data: str | None,
    sizes: Sizes,
    tokenizer: Tokenizer | None,
    *,
    packed: bool = False,
    pairs: bool = False,
) -> Text:
    """Return what the user named, as tokens.

    Args:
        data: Text files, or files of rows; `None` is the demonstration corpus.
        sizes: The model's; a Hugging Face model has a chat template among its files.
        tokenizer: `None` trains one on the text.
        packed: Whether a sequence may hold several rows; they, and documents of running text, do
            not see each other then.
        pairs: Whether each row must say which of two answers is the better one.

    Raises:
        DataError: something cannot be read or learnt, or no row has an answer; names the file, and
            the line if there is one.
    """
    if not has_rows(data):
        if pairs:
            raise DataError(
                f"{data or 'the demo corpus'} is running text; answers to compare are in rows "
                "with chosen and rejected: name files with --data that end in "
                f"{', '.join(SUFFIXES)}"
            )
        return _running(data, read_corpus(data), sizes, tokenizer, packed)
    assert data is not None
    answered = _Answered(data)
    if not isinstance(sizes, HuggingFaceConfig):
        corpus = corpus_of_texts(data, list(answered.through(_text_only)))
        text = _running(data, corpus, sizes, tokenizer, packed)
        return text._replace(skipped_rows=answered.skipped_rows, skipped=answered.told)
    assert tokenizer is not None
    encoder = Encoder(tokenizer, ChatTemplate(sizes.files))
    material: ExampleMaterial | PairMaterial
    if pairs:
        both = itertools.chain.from_iterable(answered.through(encoder.encode_pair))
        material = PairMaterial(Examples(both, data, together=2), tokenizer.separator)
    else:
        examples = Examples(answered.through(encoder.encode), data)
        material = ExampleMaterial(examples, packed, tokenizer.separator)
    sha256 = material.examples.counts.sha256
    return Text(data, sha256, tokenizer, material, answered.skipped_rows, answered.told)


def own_text(material: Material, sampler: Batches, context: int, micro_batch: int) -> Batch:
    """Return the few sequences by which a peer judges what others give, always the same ones.

    They are held out; where too little is for one sequence, they come from what is trained on.
    """
    count = max(1, -(-_JUDGED_SEQUENCES // micro_batch))
    try:
        return joined(list(material.held_out(context, micro_batch, count)))
    except DataError:
        rows, batch = slice(count * micro_batch), sampler.batch(0)
        return batch._replace(
            **{key: part[rows] for key, part in batch._asdict().items() if part is not None}
        )


def has_pairs(data: str | None) -> bool:
    """Return whether the first row of data says which of two answers is the better one."""
    if data is None or not has_rows(data):
        return False
    first = next(iter(read_rows(data)), None)
    return first is not None and is_pair(first)


def _running(
    data: str | None, corpus: Corpus, sizes: Sizes, tokenizer: Tokenizer | None, packed: bool
) -> Text:
    prepared = prepare(corpus, default_cache(), vocabulary=sizes.vocabulary, tokenizer=tokenizer)
    separator = prepared.tokenizer.separator if packed else None
    return Text(data, corpus.sha256, prepared.tokenizer, TextMaterial(prepared.tokens, separator))


def _text_only(row: Row) -> str:
    said = understand(row)
    if not isinstance(said, Plain) or said.kind != "text":
        raise DataError(
            f"{row.place}: is of kind {said.kind!r}, which needs a trained model; name the "
            "folder of one with --model, or give rows with text"
        )
    return said.answer
