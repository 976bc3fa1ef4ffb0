"""Byte-level byte-pair encoding: any text is encoded, and decoding gives it back exactly."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atomtrain.data.tokenizer_check import checked_growth
from atomtrain.errors import DataError, nearest, reason_of
from atomtrain.files import read_small

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SEPARATOR = "<|endoftext|>"
DEFAULT_VOCABULARY = 4096
MIN_VOCABULARY = 257  # every byte, and the separator
_MOST_CHARACTERS = 8 << 20
"""Of a text that is encoded at once: its tokens take a hundred times its bytes."""
_MOST_BYTES = 128 << 20
"""Of a tokenizer's file; the largest that is known takes 33 MiB."""
_OLDER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
_VOCABULARY_FILES = (
    "merges.txt", "added_tokens.json", "special_tokens_map.json", "sentencepiece.bpe.model",
)  # fmt: skip
_KINDS = ("model_type", "tokenizer_class")
_SETTINGS = (
    "tokenizer_class", "model_type", "added_tokens_decoder", "additional_special_tokens",
    "extra_special_tokens", "bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
    "cls_token", "mask_token", "add_bos_token", "add_eos_token", "add_prefix_space",
    "add_dummy_prefix", "do_lower_case", "do_basic_tokenize", "never_split", "strip_accents",
    "tokenize_chinese_chars", "keep_accents", "remove_space", "legacy", "errors",
    "trim_offsets", "clean_up_tokenization_spaces", "normalization",
)  # fmt: skip
"""Of an older tokenizer's `tokenizer_config.json`: what decides its tokens."""


class Marked(NamedTuple):
    """Tokens, and at which character of the text each begins."""

    tokens: list[int]
    starts: list[int]


class Tokenizer:
    """Turns text into token numbers and back; a thin layer over the `tokenizers` library.

    The separator stands between documents. It exists as a number only: a text that happens to
    contain its characters is encoded like any other, and cannot forge the end of a document.
    """

    def __init__(self, backend: Backend, separator: str = SEPARATOR) -> None:
        """Wrap `backend`, whose vocabulary must hold `separator`.

        Raises:
            DataError: it does not, or takes steps that no published tokenizer takes.
        """
        self._growth = checked_growth(backend)
        number = backend.token_to_id(separator) if isinstance(separator, str) else None
        if number is None:
            raise DataError(
                f"the tokenizer has no token {separator!r} to put between documents; "
                f"name one that it has.{nearest(str(separator), backend.get_vocab())}"
            )
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.separator_text: str = separator
        self.separator: int = number
        self.vocabulary: int = 1 + max(backend.get_vocab().values())
        """Number of tokens; numbers run from 0 to one less."""

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int = DEFAULT_VOCABULARY) -> Tokenizer:
        """Learn a vocabulary from `texts`; equal texts give an equal tokenizer.

        The result may have fewer tokens than `vocabulary` if the texts have too few pairs.

        Raises:
            DataError: `vocabulary` has no room for every byte and the separator.
        """
        if vocabulary < MIN_VOCABULARY:
            raise DataError(
                f"a vocabulary of {vocabulary} is too small; it must be at least "
                f"{MIN_VOCABULARY} (every byte and the separator), {DEFAULT_VOCABULARY} is usual"
            )
        from tokenizers import Tokenizer as NewBackend
        from tokenizers import decoders, models, pre_tokenizers, trainers

        backend = NewBackend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def from_json(cls, text: str, separator: str = SEPARATOR) -> Tokenizer:
        """Return the tokenizer that `to_json` wrote, or any other in the same file format.

        Raises:
            DataError: the text is not a tokenizer, or has no token `separator`.
        """
        from tokenizers import Tokenizer as NewBackend

        try:
            backend = NewBackend.from_str(text)
        except Exception as error:  # the library raises nothing more specific
            raise DataError(
                f"the tokenizer cannot be read ({error}); it must be the content of a "
                "tokenizer.json file"
            ) from error
        return cls(backend, separator)

    def check_room(self, rows: int, what: str) -> None:
        """Refuse to be used with a model whose embedding has fewer rows than there are tokens.

        Raises:
            DataError: it has.
        """
        if self.vocabulary > rows:
            raise DataError(
                f"the tokenizer in {what} has {self.vocabulary} tokens, the model has room for "
                f"{rows}; both must be of one model"
            )

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json` file."""
        return self._backend.to_str()

    @property
    def sha256(self) -> str:
        """Checksum of the tokenizer, hexadecimal."""
        return hashlib.sha256(f"{self.separator} {self.to_json()}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the token numbers of `text`; never the separator.

        Raises:
            DataError: it is longer than can be held as tokens at once, or cannot be encoded.
        """
        numbers: list[int] = self._encoded(text).ids
        return numbers

    def encode_whole(self, text: str) -> list[int]:
        """Return the token numbers of a text with the special ones that the tokenizer puts around
        it; the text itself has none."""
        numbers: list[int] = self._encoded(text, special=True).ids
        return numbers

    def encode_marked(self, text: str) -> Marked:
        """Return the tokens of a text in which special tokens are written out, as by a template."""
        self._backend.encode_special_tokens = False
        try:
            encoding = self._encoded(text)
        finally:
            self._backend.encode_special_tokens = True
        return Marked(encoding.ids, [start for start, _ in encoding.offsets])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of each text, using all cores."""
        step = max(1, len(texts) // self._growth)
        return [
            encoding.ids
            for first in range(0, len(texts), step)
            for encoding in _told_of(
                self._backend.encode_batch_fast,
                list(texts[first : first + step]),
            )
        ]

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text; bytes that are no whole character become replacement characters."""
        return self._backend.decode(list(numbers), skip_special_tokens=False)

    def _encoded(self, text: str, *, special: bool = False) -> Any:
        most = _MOST_CHARACTERS // self._growth
        if len(text) > most:
            raise DataError(
                f"a text of {len(text)} characters is too long to be one example, at most {most} "
                "are taken; divide it, or give it as running text (.txt)"
            )
        return _told_of(self._backend.encode, text, special=special)


def _told_of(encode: Callable[..., Any], what: Any, *, special: bool = False) -> Any:
    """Encode, or say that the tokenizer cannot."""
    try:
        return encode(what, add_special_tokens=special)
    except Exception as error:  # the library raises nothing more specific
        raise DataError(
            f"the tokenizer cannot encode a text ({reason_of(error)}); copy the one that the "
            "model was trained with"
        ) from error


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face model; its end-of-text token separates documents.

    Raises:
        DataError: the folder has none, or it names no end-of-text token.
    """
    file = folder / "tokenizer.json"
    try:
        text = read_small(file, _MOST_BYTES)
    except FileNotFoundError:
        text = _converted(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}); restore it") from error
    separator = _end_of_text(folder)
    if separator is None:
        raise DataError(
            f"{folder} names no eos_token in tokenizer_config.json, which is to stand between "
            "documents; add it"
        )
    return Tokenizer.from_json(text, separator)


def _converted(folder: Path) -> str:
    """Return a tokenizer that lies there in an older format, as the content of tokenizer.json."""
    problem = DataError(
        f"{folder} has no tokenizer (tokenizer.json); copy the one that the model was trained with"
    )
    if not any((folder / name).is_file() for name in _OLDER_FILES):
        raise problem
    try:
        with tempfile.TemporaryDirectory(prefix="atom-tokenizer-") as alone:
            _copy_vocabulary(folder, Path(alone))
            from transformers import AutoTokenizer

            load: Any = AutoTokenizer.from_pretrained
            made = load(alone, local_files_only=True, trust_remote_code=False)
            return str(made.backend_tokenizer.to_str())
    except Exception as error:  # of several libraries
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"the tokenizer in {folder} cannot be converted ({reason}); "
            "save it once with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        ) from error


def _copy_vocabulary(folder: Path, target: Path) -> None:
    """Copy what makes a tokenizer: vocabularies, and settings that are names, words or truths.

    What else a folder holds (code, references to code) is not there to be found.
    """
    for name in (*_OLDER_FILES, *_VOCABULARY_FILES):
        if (folder / name).is_file():
            if (folder / name).stat().st_size > _MOST_BYTES:
                raise ValueError(f"{name} is larger than {_MOST_BYTES >> 20} MiB")
            shutil.copyfile(folder / name, target / name)
    for name, known in (("tokenizer_config.json", _SETTINGS), ("config.json", _KINDS)):
        try:
            stored = json.loads(read_small(folder / name))
        except FileNotFoundError:
            continue
        kept = {key: value for key, value in stored.items() if key in known}
        (target / name).write_text(json.dumps(kept), encoding="utf-8")


def _end_of_text(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            value = json.loads(read_small(folder / name)).get("eos_token")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(f"{folder / name} cannot be read ({error}); restore it") from error
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value:
            return value
    return None
