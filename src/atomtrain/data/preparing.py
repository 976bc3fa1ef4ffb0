"""From a corpus to a tokenizer and tokens in one call, both kept in a cache folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from atomtrain.data.corpus import Corpus
from atomtrain.data.split import HoldOut, pieces
from atomtrain.data.tokenizer import DEFAULT_VOCABULARY, Tokenizer
from atomtrain.data.tokens import Tokens, disk_errors, open_tokens
from atomtrain.errors import DataError
from atomtrain.files import replacing
from atomtrain.progress import Progress

TOKENIZER_SAMPLE_CHARACTERS = 32 * 1024 * 1024

_logger = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """What training needs of a corpus."""

    tokenizer: Tokenizer
    tokens: Tokens


def prepare(
    corpus: Corpus,
    cache: Path,
    *,
    vocabulary: int = DEFAULT_VOCABULARY,
    tokenizer: Tokenizer | None = None,
    hold_out: HoldOut = "some",
) -> Prepared:
    """Return tokenizer and tokens of `corpus`; a few seconds the first time, then from `cache`.

    Args:
        corpus: the text.
        cache: folder for the tokenizer and the token file; made if missing.
        vocabulary: tokens of the tokenizer that is trained on the corpus, held-out text excluded.
        tokenizer: use this one (of a checkpoint, of the swarm) and train none.
        hold_out: what of the tokens to evaluate on.

    Raises:
        DataError: see `Tokenizer.train` and `open_tokens`.
    """
    if tokenizer is None:
        tokenizer = cached_tokenizer(corpus, vocabulary, cache)
    return Prepared(tokenizer, open_tokens(corpus, tokenizer, cache, hold_out))


def cached_tokenizer(corpus: Corpus, vocabulary: int, cache: Path) -> Tokenizer:
    """Return the tokenizer of a corpus, from `cache` if it is there and intact."""
    path = cache / f"tokenizer-{corpus.sha256[:32]}-{vocabulary}.json"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except DataError as error:
        _logger.warning("%s; training it again", error)
    with Progress("training a tokenizer"):
        tokenizer = Tokenizer.train(_sample(corpus), vocabulary)
    with disk_errors(path):
        cache.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_text(_envelope(tokenizer.to_json()), encoding="utf-8")
    return tokenizer


def _read(path: Path) -> Tokenizer:
    try:
        content = path.read_bytes()
        text = str(json.loads(content)["tokenizer"])
        if _envelope(text).encode() != content:
            raise DataError(f"{path} is damaged (its checksum does not match)")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error!r})") from error
    return Tokenizer.from_json(text)


def _envelope(text: str) -> str:
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokenizer": text})


def _sample(corpus: Corpus) -> Iterator[str]:
    """Yield training text spread evenly over the corpus, at most about 32 MiB of it."""
    stride = max(1, -(-corpus.characters // TOKENIZER_SAMPLE_CHARACTERS))
    for piece in itertools.islice(pieces(corpus, "train"), 0, None, stride):
        yield piece.text
