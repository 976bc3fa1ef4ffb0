"""What a run learns from: running text, or rows with answers, with the tokenizer for it."""

from __future__ import annotations

from typing import NamedTuple

from atomtrain.data import Tokenizer, default_cache, prepare, read_corpus
from atomtrain.data.chat import ChatTemplate, Encoder
from atomtrain.data.corpus import Corpus, corpus_of_texts
from atomtrain.data.dialogues import Plain, is_pair, understand
from atomtrain.data.examples import Examples
from atomtrain.data.material import ExampleMaterial, Material, TextMaterial
from atomtrain.data.pairs import PairMaterial
from atomtrain.data.rows import has_rows, read_rows
from atomtrain.errors import DataError
from atomtrain.models import HuggingFaceConfig, Sizes


class Text(NamedTuple):
    """What is trained on."""

    data: str | None
    """As the user named it; `None` is the demo corpus."""
    sha256: str
    tokenizer: Tokenizer
    material: Material


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
        DataError: something cannot be read or learnt; names the file, and the line if there is one.
    """
    if not has_rows(data):
        if pairs:
            raise DataError(
                f"{data or 'the demo corpus'} is running text; --objective dpo needs rows with "
                "chosen and rejected: name .jsonl, .json or .parquet files with --data"
            )
        return _running(data, read_corpus(data), sizes, tokenizer, packed)
    assert data is not None
    if not isinstance(sizes, HuggingFaceConfig):
        corpus = corpus_of_texts(data, _texts_only(data))
        return _running(data, corpus, sizes, tokenizer, packed)
    assert tokenizer is not None
    encoder = Encoder(tokenizer, ChatTemplate(sizes.files))
    if pairs:
        both = (example for row in read_rows(data) for example in encoder.encode_pair(row))
        examples = Examples(both, data, together=2)
        paired = PairMaterial(examples, tokenizer.separator)
        return Text(data, examples.counts.sha256, tokenizer, paired)
    examples = Examples((encoder.encode(row) for row in read_rows(data)), data)
    material = ExampleMaterial(examples, packed, tokenizer.separator)
    return Text(data, examples.counts.sha256, tokenizer, material)


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


def _texts_only(data: str) -> list[str]:
    texts = []
    for row in read_rows(data):
        said = understand(row)
        if not isinstance(said, Plain) or said.kind != "text":
            raise DataError(
                f"{row.place}: is of kind {said.kind!r}, which needs a trained model; name the "
                "folder of one with --model, or give rows with text"
            )
        texts.append(said.answer)
    return texts
