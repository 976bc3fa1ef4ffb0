"""A model's chat template, and examples as tokens of which the answers count."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import mmap
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from atomtrain.data.dialogues import (
    Dialogue,
    Judged,
    Match,
    Message,
    Plain,
    exchanged,
    understand,
    understand_pair,
)
from atomtrain.data.labels import Labelled
from atomtrain.data.pictures import Picture
from atomtrain.data.rows import Row
from atomtrain.data.tokenizer import Tokenizer
from atomtrain.errors import DataError

_LEGACY_FILE = "chat_template.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


_MOST_S, _MORE_BYTES = 2.0, 512 << 20
"""For one text; usual are milliseconds and some kilobytes."""


class Example(NamedTuple):
    """One example; `answers[i]` says whether `tokens[i]` is to be predicted."""

    kind: str
    tokens: list[int]
    answers: list[bool]
    answer_bytes: int
    """UTF-8 bytes of the text that is to be predicted."""
    label: int | None = None
    """Number of the row's class; of judged answers 1 of a good one, 0 of another."""
    pictures: tuple[Picture, ...] = ()
    """In the order in which the tokens stand for them."""


class Rendered(NamedTuple):
    """Messages as one text, and where in it the answers are."""

    whole: str
    spans: list[tuple[int, int]]

    @property
    def answer_bytes(self) -> int:
        """UTF-8 bytes of all answers."""
        return sum(len(self.whole[start:stop].encode()) for start, stop in self.spans)

    def is_answer(self, at: int) -> bool:
        """Return whether a character is of an answer."""
        return any(start <= at < stop for start, stop in self.spans)


class ChatTemplate:
    """Renders messages as the model was taught to read them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """Find the template by content: in `chat_template.jinja`, in `chat_template.json` as older
        processors keep it, or in `tokenizer_config.json`.
        """
        config, of_processor = (
            _object(files.get(name, "{}")) for name in ("tokenizer_config.json", _LEGACY_FILE)
        )
        found = (
            files.get("chat_template.jinja")
            or of_processor.get("chat_template")
            or config.get("chat_template")
        )
        if isinstance(found, list):  # several by name
            named = [each for each in found if isinstance(each, dict)]
            found = next((t.get("template") for t in named if t.get("name") == "default"), None)
        self.text: str | None = found if isinstance(found, str) else None
        self._tokens = {name: _content(config.get(name)) for name in _SPECIAL}

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return the messages as one text; with `prompt` up to where the assistant would answer.

        Raises:
            DataError: the model has no template, or the template refuses these messages.
        """
        if self.text is None:
            raise DataError(
                "the model has no chat template (chat_template.jinja); add one, or give rows with "
                "prompt and completion as texts"
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        try:
            if _has_powers(self.text):
                raise DataError("it raises to a power")
            with bounded("<template>", _MOST_S, _MORE_BYTES):
                rendered, _ = render(
                    [list(messages)],
                    chat_template=self.text,
                    add_generation_prompt=prompt,
                    **{name: token for name, token in self._tokens.items() if token is not None},
                )
        except Exception as error:  # whatever the template raises
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise DataError(f"the chat template refuses it ({reason})") from error
        return str(rendered[0])


class Encoder:
    """Turns rows into examples."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template

    def encode(self, row: Row) -> Example:
        """Return a row as tokens.

        Raises:
            NoAnswerError: the row has no answer.
            DataError: what the row says cannot be learnt; names file and line.
        """
        return self._encoded(row, understand(row))

    def encode_pair(self, row: Row) -> tuple[Example, Example]:
        """Return the better answer and the other one, each behind the prompt.

        Raises:
            NoAnswerError: the row lacks one of both.
            DataError: the row is not a pair; names file and line.
        """
        chosen, rejected = understand_pair(row)
        return self._encoded(row, chosen), self._encoded(row, rejected)

    def encode_judged(self, rows: Iterable[Judged]) -> Iterator[Example]:
        """Yield two examples a row: its own, and its prompt with the answer of the row before it.

        The first row gets the second one's answer. What a model thinks of answers that have nothing
        to do with their prompts tells how far it has moved (see `objectives.py`).

        Raises:
            DataError: there are fewer than two rows, or not all of one form.
        """
        found = iter(rows)
        first = list(itertools.islice(found, 2))
        if len(first) < 2:
            raise DataError("there are fewer than 2 rows with prompt, completion and label")
        before = first[1]
        for judged in itertools.chain(first, found):
            for said in (judged.said, exchanged(judged, before)):
                yield self._encoded(judged.row, said)._replace(label=int(judged.good))
            before = judged

    def encode_labelled(self, said: Labelled, known: Mapping[str, int], padding: int) -> Example:
        """Return a text as transformers' tokenizer gives it, special tokens included.

        Padding stands behind it as what is to be predicted, so that all tokens are read.

        Args:
            said: A row.
            known: Numbers of labels.
            padding: Token that is not read.

        Raises:
            DataError: the label is unknown, or the text cannot be learnt; names file and line.
        """
        label = said.number(known)
        return self._whole(said.row, "labelled", said.text, padding)._replace(label=label)

    def encode_match(self, said: Match, padding: int) -> tuple[Example, Example]:
        """Return both texts of a row, each as `encode_labelled` does.

        Raises:
            DataError: a text cannot be learnt; names file and line.
        """
        query = self._whole(said.row, "match", said.query, padding)
        return query, self._whole(said.row, "match", said.positive, padding)

    def _whole(self, row: Row, kind: str, text: str, padding: int) -> Example:
        try:
            tokens = self._tokenizer.encode_whole(text)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
        return Example(kind, [*tokens, padding], [True] * (len(tokens) + 1), len(text.encode()))

    def _encoded(self, row: Row, said: Dialogue | Plain) -> Example:
        try:
            return self._plain(said) if isinstance(said, Plain) else self._dialogue(said)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error

    def _plain(self, said: Plain) -> Example:
        prompt = self._tokenizer.encode(said.prompt)
        answer = [*self._tokenizer.encode(said.answer), self._tokenizer.separator]
        answers = [False] * len(prompt) + [True] * len(answer)
        return Example(said.kind, prompt + answer, answers, len(said.answer.encode()))

    def _dialogue(self, said: Dialogue) -> Example:
        if not all(isinstance(message["content"], str) for message in said.messages):
            raise DataError(
                "a message's content is a list, which is read where the model reads images and "
                "each row has one; give texts, or images in all rows and such a model with --model"
            )
        rendered = self._rendered(said)
        encoded = self._tokenizer.encode_marked(rendered.whole)
        # A token counts if it begins in an answer: merges do not cross the template's own tokens.
        answers = [rendered.is_answer(at) for at in encoded.starts]
        return Example(said.kind, encoded.tokens, answers, rendered.answer_bytes)

    def _rendered(self, said: Dialogue) -> Rendered:
        whole = self._template.render(said.messages)
        spans = []
        for index in range(len(said.messages)):
            if said.learns(index):
                spans.append(self._span(said.messages, index, whole))
        return Rendered(whole, spans)

    def _span(self, messages: list[Message], index: int, whole: str) -> tuple[int, int]:
        """Return where an answer begins and ends in the rendered text."""
        before = self._template.render(messages[:index], prompt=True)
        after = self._template.render(messages[: index + 1])
        if not (whole.startswith(before) and whole.startswith(after) and after > before):
            raise DataError(
                f"the chat template renders message {index} otherwise when more follow, so it "
                "cannot be told what is an answer; give such dialogues with one answer each"
            )
        return len(before), len(after)


@functools.lru_cache(maxsize=8)
def _has_powers(template: str) -> bool:
    """Say whether there is `**`: a power of whole numbers is one operation, which nothing
    interrupts."""
    from jinja2 import Environment

    return any(sign == "**" for _, kind, sign in Environment().lex(template) if kind == "operator")


def _object(text: str) -> dict[str, Any]:
    """Return a JSON object, an empty one of what is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


_MEMORY = Path("/proc/self/statm")


@contextlib.contextmanager
def bounded(file: str, most_s: float, more_bytes: int) -> Iterator[None]:
    """End what runs within after a time, and have allocations fail beyond some more memory.

    Args:
        file: What Python calls the file of the code that is watched; each of its lines looks at
            the clock.
        most_s: Seconds.
        more_bytes: Of address space, for the whole process meanwhile, beyond what it has (Linux).

    Raises:
        TimeoutError: the time is over.
        MemoryError: so much memory is not given.
    """
    until_s = time.monotonic() + most_s

    def look(frame: FrameType, *_: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        if time.monotonic() > until_s:
            raise TimeoutError(f"it takes more than {most_s:g} s")
        return look

    before = sys.gettrace()
    with _memory_within(more_bytes):
        sys.settrace(look)
        try:
            yield
        finally:
            sys.settrace(before)


@contextlib.contextmanager
def _memory_within(more_bytes: int) -> Iterator[None]:
    try:
        pages = int(_MEMORY.read_text(encoding="ascii").split()[0])
    except FileNotFoundError:  # not Linux, so there may be no such limits
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * mmap.PAGESIZE + more_bytes
    limits = [limit for limit in (wanted, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
