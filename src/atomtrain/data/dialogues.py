"""What a row says: a dialogue whose answers are learnt, or a text.

| kind | keys of a row |
|---|---|
| messages | `messages`: a list of `{"role", "content"}`, roles system, user, assistant, tool |
| sharegpt | `conversations`: a list of `{"from", "value"}` |
| alpaca | `instruction`, `output`, and possibly `input` and `system` |
| completion | `prompt` and `completion` (texts: no template; or lists of messages) |
| text | `text`: everything is learnt |

A row may instead say which of two answers is the better one:

| kind | keys of a row |
|---|---|
| preference | `chosen` and `rejected`, and possibly `prompt`: texts, or lists of messages |

or whether an answer is a good one (rows with classes are in `labels`):

| kind | keys of a row |
|---|---|
| judged | `prompt` and `completion` as above, and `label`: true or false |

or which text belongs to another:

| kind | keys of a row |
|---|---|
| match | `query` (or `anchor`) and `positive`: texts |

An answer that is empty, blank or null is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from atomtrain.data.rows import Row
from atomtrain.errors import DataError

Message = dict[str, Any]
"""`role`, and `content`: a text, or a list of `{"type": "text", "text"}` and
`{"type": "image", "path"}`, with the picture's name in the row."""
ROLES = ("system", "user", "assistant", "tool")
_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "tool": "tool",
    "function_response": "tool", "observation": "tool",
}  # fmt: skip
PREFERENCE = "preference"
_NAMES = {"text": ("text",), "image": ("path", "image", "url")}
"""Keys of what a content's item holds; an image's are those of transformers' chat templates."""


_UNREAD = "tool_calls", "function_call", "reasoning_content", "thinking"
"""What others' messages say beside their content."""


class NoAnswerError(DataError):
    """A row says nothing that could be learnt."""


class Dialogue(NamedTuple):
    """Messages, of which those of the assistant are learnt that are not blank."""

    kind: str
    messages: list[Message]
    from_message: int = 0
    """The first message whose answers are learnt."""
    unlearnt: frozenset[int] = frozenset()
    """Messages that have the weight 0."""

    def learns(self, index: int) -> bool:
        """Return whether a message is an answer that is to be learnt."""
        learnt = index >= self.from_message and index not in self.unlearnt
        return learnt and is_answer(self.messages[index])


class Plain(NamedTuple):
    """A text that follows another, as it is."""

    kind: str
    prompt: str
    answer: str


def understand(row: Row) -> Dialogue | Plain:
    """Return what a row says.

    Raises:
        NoAnswerError: it has no answer.
        DataError: it is of none of the kinds, lacks something, or says what is not read; names file
            and line.
    """
    values = row.values
    if values.get("tools") and values["tools"] != "[]":
        raise DataError(
            f"{row.place}: has tools, which are not read; write them into a system message, as the "
            "model is to see them"
        )
    if is_pair(row):
        raise DataError(
            f"{row.place}: is a pair of answers (chosen and rejected); learn from such with "
            "--objective dpo, simpo, orpo or reward, and from no other rows beside them"
        )
    if values.get("messages") is not None:
        return _weighted(row)
    if values.get("conversations") is not None:
        return _answered(row, "sharegpt", _turns(row))
    if "instruction" in values and "output" in values:
        return _answered(row, "alpaca", _alpaca(row))
    if "prompt" in values and "completion" in values:
        return _completion(row)
    if "text" in values:
        return Plain("text", "", text_of(row, "text"))
    keys = ", ".join(map(repr, values)) or "nothing"
    raise DataError(
        f"{row.place}: has {keys}; a row needs messages, conversations, instruction and output, "
        "prompt and completion, or text"
    )


class Pair(NamedTuple):
    """Two answers to the same."""

    chosen: Dialogue | Plain
    rejected: Dialogue | Plain


def is_pair(row: Row) -> bool:
    """Return whether a row says which of two answers is the better one."""
    values = row.values
    both = "chosen" in values and "rejected" in values
    return both and (values["chosen"] is not None or values["rejected"] is not None)


def names_images(row: Row) -> bool:
    """Return whether a row's messages name an image."""
    messages = row.values.get("messages")
    said = messages if isinstance(messages, list) else ()
    contents = [message.get("content") for message in said if isinstance(message, Mapping)]
    items = [item for content in contents if isinstance(content, list) for item in content]
    return any(isinstance(item, Mapping) and item.get("type") == "image" for item in items)


def understand_pair(row: Row) -> Pair:
    """Return both answers of a row, each behind the prompt.

    Raises:
        NoAnswerError: one of the two is missing.
        DataError: they are not of one form; names file and line.
    """
    if "chosen" not in row.values or "rejected" not in row.values:
        keys = ", ".join(map(repr, row.values)) or "nothing"
        raise DataError(
            f"{row.place}: has {keys}; answers are compared in rows that all have chosen and "
            "rejected, and usually prompt"
        )
    chosen, rejected = (_preferred(row, key) for key in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise DataError(
            f"{row.place}: 'chosen' and 'rejected' must both be texts, or both lists of messages"
        )
    return Pair(chosen, rejected)


class Match(NamedTuple):
    """Two texts that belong together."""

    row: Row
    query: str
    positive: str


def understand_match(row: Row) -> Match:
    """Return what a row asks, and the text that belongs to it.

    Raises:
        NoAnswerError: one of the two is empty.
        DataError: one lacks, or there is a `negative`, which is not read; names file and line.
    """
    asked = "anchor" if "anchor" in row.values else "query"
    if asked not in row.values or "positive" not in row.values:
        keys = ", ".join(map(repr, row.values)) or "nothing"
        raise DataError(
            f"{row.place}: has {keys}; embeddings are learnt from rows with query and positive"
        )
    if row.values.get("negative") is not None:
        raise DataError(
            f"{row.place}: has 'negative', which is not read: the texts of other rows are the "
            "wrong ones; leave it out"
        )
    return Match(row, text_of(row, asked), text_of(row, "positive"))


class Judged(NamedTuple):
    """An answer that is a good one, or not."""

    row: Row
    said: Dialogue | Plain
    good: bool


def understand_judged(row: Row) -> Judged:
    """Return the answer of a row behind its prompt, and its label.

    Raises:
        NoAnswerError: it has no answer.
        DataError: it lacks something, or the label is not a boolean; names file and line.
    """
    if not {"prompt", "completion", "label"} <= row.values.keys():
        keys = ", ".join(map(repr, row.values)) or "nothing"
        raise DataError(
            f"{row.place}: has {keys}; answers are judged in rows that all have prompt, completion "
            "and label"
        )
    label = row.values["label"]
    if not isinstance(label, bool):
        raise DataError(f"{row.place}: 'label' must be true or false, not {label!r:.40}")
    return Judged(row, _completion(row), label)


def exchanged(judged: Judged, other: Judged) -> Dialogue | Plain:
    """Return another row's answer behind the prompt of this one.

    Raises:
        DataError: one has texts, the other one messages; names file and line.
    """
    said, instead = judged.said, other.said
    if isinstance(said, Plain) and isinstance(instead, Plain):
        return Plain(said.kind, said.prompt, instead.answer)
    if isinstance(said, Dialogue) and isinstance(instead, Dialogue):
        messages = said.messages[: said.from_message] + instead.messages[instead.from_message :]
        return Dialogue(said.kind, messages, said.from_message)
    raise DataError(
        f"{judged.row.place}: has texts where {other.row.place} has messages, or the reverse; give "
        "all rows in one form"
    )


def _preferred(row: Row, key: str) -> Dialogue | Plain:
    prompt = row.values.get("prompt")
    if row.values[key] is None or isinstance(row.values[key], str):
        answer_text = text_of(row, key)
        if isinstance(prompt, list):
            raise DataError(
                f"{row.place}: 'prompt' is a list of messages, so {key!r} must be one as well"
            )
        return Plain(PREFERENCE, "" if prompt is None else _text(row, "prompt"), answer_text)
    answer = _answered(row, PREFERENCE, _messages(row, key)).messages
    if isinstance(prompt, str):
        before = [{"role": "user", "content": prompt}]
    else:
        before = [] if prompt is None else _messages(row, "prompt")
    if before:
        return Dialogue(PREFERENCE, [*before, *answer], len(before))
    return Dialogue(PREFERENCE, answer, _shared(row))


def _shared(row: Row) -> int:
    """Return how many messages both answers begin with: those are the prompt."""
    chosen, rejected = row.values["chosen"], row.values["rejected"]
    count = 0
    if isinstance(chosen, list) and isinstance(rejected, list):
        while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
            count += 1
    return count


def _weighted(row: Row) -> Dialogue:
    """Return messages, without those of the weight 0 among what is learnt.

    Raises:
        NoAnswerError: nothing is left to learn.
        DataError: a weight is neither 0 nor 1.
    """
    messages, unlearnt = _messages(row, "messages"), set()
    for index, message in enumerate(row.values["messages"]):
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise DataError(
                f"{row.place}: messages[{index}] has the weight {weight!r:.40}; allowed are 0 (not "
                "learnt) and 1"
            )
        if weight == 0:
            unlearnt.add(index)
    found = Dialogue("messages", messages, unlearnt=frozenset(unlearnt))
    if not any(map(found.learns, range(len(messages)))):
        raise NoAnswerError(f"{row.place}: no message is an assistant's answer")
    return found


def _answered(row: Row, kind: str, messages: list[Message]) -> Dialogue:
    if not any(is_answer(message) for message in messages):
        raise NoAnswerError(f"{row.place}: no message is an assistant's answer")
    return Dialogue(kind, messages)


def is_answer(message: Message) -> bool:
    """Return whether a message is the assistant's and not blank."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(item.get("text", "") for item in content)
    return message["role"] == "assistant" and bool(content.strip())


def _messages(row: Row, key: str) -> list[Message]:
    found = row.values[key]
    if not isinstance(found, list) or not found:
        raise DataError(f"{row.place}: {key!r} must be a list of messages")
    return [_message(row, key, index, message) for index, message in enumerate(found)]


def _message(row: Row, key: str, index: int, message: Any) -> Message:
    where = f"{row.place}: {key}[{index}]"
    if not isinstance(message, Mapping):
        raise DataError(f"{where} must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DataError(f"{where} has the role {role!r}; allowed are {', '.join(ROLES)}")
    for name in _UNREAD:
        if message.get(name):
            raise DataError(
                f"{where} has {name}, which is not read; write it into the content, as the model "
                "is to say or see it"
            )
    if isinstance(content, list):
        items = [_item(f"{where}: content[{i}]", item) for i, item in enumerate(content)]
        if role == "assistant" and any(item["type"] == "image" for item in items):
            raise DataError(f"{where} is an answer with an image; answers are texts")
        return {"role": role, "content": items}
    if not isinstance(content, str):
        raise DataError(f"{where} needs a text as its content, not {type(content).__name__}")
    return {"role": role, "content": content}


def _item(where: str, item: Any) -> dict[str, str]:
    """Return a part of a content: a text, or an image with the name of its file as `path`."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind not in ("text", "image"):
        raise DataError(f"{where} is of type {str(kind)[:40]!r}; allowed are text and image")
    found = [item[key] for key in _NAMES[kind] if item.get(key) is not None]
    if len(found) != 1 or not isinstance(found[0], str):
        raise DataError(
            f"{where} is {'a text' if kind == 'text' else 'an image'} without "
            f"{' or '.join(_NAMES[kind])}; give one of them, as a text"
        )
    return {"type": kind, "text" if kind == "text" else "path": found[0]}


def _turns(row: Row) -> list[Message]:
    turns = row.values["conversations"]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{row.place}: 'conversations' must be a list of turns")
    messages = []
    if row.values.get("system"):
        messages.append({"role": "system", "content": _text(row, "system")})
    for index, turn in enumerate(turns):
        where = f"{row.place}: conversations[{index}]"
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise DataError(f"{where} must be an object with from and value, a text")
        role = _SPEAKERS.get(str(turn.get("from")))
        if role is None:
            raise DataError(
                f"{where} is from {turn.get('from')!r}; known are {', '.join(_SPEAKERS)}"
            )
        messages.append({"role": role, "content": turn["value"]})
    return messages


def _alpaca(row: Row) -> list[Message]:
    asked = _text(row, "instruction")
    if row.values.get("input"):
        asked = f"{asked}\n\n{_text(row, 'input')}"
    messages = []
    if row.values.get("system"):
        messages.append({"role": "system", "content": _text(row, "system")})
    for before in row.values.get("history") or ():
        pair = isinstance(before, list | tuple) and len(before) == 2
        if not pair or not all(isinstance(said, str) for said in before):
            raise DataError(f"{row.place}: 'history' must be a list of pairs of texts")
        asked_before, answer = before
        messages.append({"role": "user", "content": asked_before})
        messages.append({"role": "assistant", "content": answer})
    return [
        *messages,
        {"role": "user", "content": asked},
        {"role": "assistant", "content": text_of(row, "output")},
    ]


def _completion(row: Row) -> Dialogue | Plain:
    if isinstance(row.values["prompt"], list):
        prompt, answer = _messages(row, "prompt"), _messages(row, "completion")
        made = _answered(row, "completion", answer)
        return Dialogue("completion", [*prompt, *made.messages], len(prompt))
    return Plain("completion", _text(row, "prompt"), text_of(row, "completion"))


def text_of(row: Row, key: str) -> str:
    """Return a text that is to be learnt.

    Raises:
        NoAnswerError: it is null or blank.
        DataError: it is not a text.
    """
    if row.values[key] is None or not _text(row, key).strip():
        raise NoAnswerError(f"{row.place}: {key!r} is empty")
    return _text(row, key)


def _text(row: Row, key: str) -> str:
    value = row.values[key]
    if not isinstance(value, str):
        raise DataError(f"{row.place}: {key!r} must be a text, not {type(value).__name__}")
    return value
