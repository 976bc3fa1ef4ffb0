"""Dialogues with pictures as tokens of which the answers count, and the pictures beside them.

The model's chat template renders the messages, and its processor puts tokens in the place of each
picture. Where the model asks for it, every row has as many pictures as the first one, and all come
out in one size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from atomtrain.data.chat import ChatTemplate, Encoder, Example
from atomtrain.data.dialogues import Dialogue, Message, understand
from atomtrain.data.pictures import Picture, describe_all, find_picture, open_again
from atomtrain.data.rows import Row
from atomtrain.data.tokenizer import Tokenizer
from atomtrain.errors import DataError
from atomtrain.units import counted

if TYPE_CHECKING:
    from PIL.Image import Image


class Reader(Protocol):
    """What a model's processor does."""

    image_token: str
    image_number: int
    types: str | None
    alike: bool

    def read(self, text: str, pictures: Sequence[Image], /) -> Any:
        """Return `tokens`, the character of the text at which each begins as `starts`, and what
        else the model takes as `images`."""
        ...

    def images(self, pictures: Sequence[Image], /) -> dict[str, Tensor]:
        """Return what the model takes of pictures."""
        ...


class Look(NamedTuple):
    """How rows get their images."""

    image_number: int
    """The token that stands for a part of a picture."""
    images: Callable[[Sequence[Picture]], dict[str, Tensor]]
    """Returns tensors of one row, by the names that the model gives them."""
    types: str | None = None
    """The model's name of which tokens stand for pictures; `None`: it does not ask."""


class PictureEncoder(Encoder):
    """Turns rows with pictures into examples."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, reader: Reader) -> None:
        super().__init__(tokenizer, template)
        self._reader = reader
        self._first: tuple[str, int, torch.Size] | None = None  # a row, its pictures, their size
        self.look = Look(reader.image_number, self._images, reader.types)

    def encode(self, row: Row) -> Example:
        """See `Encoder`.

        Raises:
            NoAnswerError: the row has no answer.
            DataError: what the row says cannot be learnt; names file and line.
        """
        said = understand(row)
        try:
            if not isinstance(said, Dialogue):
                raise DataError(
                    "is a text; the model reads images: give rows with messages, and an image in "
                    "each"
                )
            return self._seen(row, said)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error

    def _seen(self, row: Row, said: Dialogue) -> Example:
        messages, names = _with_items(said.messages)
        if not names:
            raise DataError(
                "has no image, and the model reads images; give each row at least one: "
                '{"type": "image", "path": FILE} in a message\'s content'
            )
        paths = [find_picture(name, row.folder) for name in names]
        rendered = self._rendered(said._replace(messages=messages))
        self._check(rendered.whole, messages, len(names))
        found = describe_all(paths)
        seen = self._reader.read(rendered.whole, [image for _, image in found])
        if self._reader.alike:
            self._check_alike(row.place, seen.images["pixel_values"], paths)
        answers = [
            token != self._reader.image_number and rendered.is_answer(start)
            for token, start in zip(seen.tokens, seen.starts, strict=True)
        ]
        pictures = tuple(picture for picture, _ in found)
        return Example(said.kind, seen.tokens, answers, rendered.answer_bytes, pictures=pictures)

    def _check(self, whole: str, messages: list[Message], pictures: int) -> None:
        """Refuse a template that leaves something out, and texts that name images by themselves."""
        token = self._reader.image_token
        if (named := whole.count(token)) != pictures:
            raise DataError(
                f"has {counted(pictures, 'image')}, and {token} stands {named} times in what the "
                "chat template makes of it; give an image for each, and leave the sign out of texts"
            )
        for index, message in enumerate(messages):
            for item in message["content"]:
                if item["type"] == "text" and item["text"].strip() not in whole:
                    raise DataError(
                        f"the chat template leaves out the text of message {index}; give the model "
                        "a chat_template.jinja that reads lists of texts and images"
                    )

    def _check_alike(self, place: str, pixels: Tensor, paths: Sequence[Path]) -> None:
        if self._first is None:
            self._first = place, len(pixels), pixels.shape[1:]
        where, count, size = self._first
        if len(pixels) != count:
            raise DataError(
                f"has {counted(len(pixels), 'image')}, and {where} has {count}; all rows must have "
                "as many: sort them into files, and train on one after the other"
            )
        if pixels.shape[1:] != size:
            raise DataError(
                f"{paths[0]} becomes {list(pixels.shape[1:])} values, and images of {where} "
                f"{list(size)}; the processor must make all of one size (crop_size)"
            )

    def _images(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        return self._reader.images([open_again(picture) for picture in pictures])


def _with_items(messages: list[Message]) -> tuple[list[Message], list[str]]:
    """Return messages whose content is a list, as templates read it, and the pictures' names."""
    made, names = [], []
    for message in messages:
        content = message["content"]
        items = [{"type": "text", "text": content}] if isinstance(content, str) else content
        names += [item["path"] for item in items if item["type"] == "image"]
        shown = [{k: v for k, v in item.items() if k != "path"} for item in items]
        made.append({**message, "content": shown})
    return made, names
