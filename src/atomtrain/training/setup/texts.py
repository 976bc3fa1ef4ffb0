"""What a run learns from: running text, or rows with answers, with the tokenizer for it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

from atomtrain.data.chat import ChatTemplate, Encoder
from atomtrain.data.corpus import Corpus, HoldOut, corpus_of_texts, read_corpus
from atomtrain.data.dialogues import (
    NoAnswerError,
    Plain,
    is_pair,
    names_images,
    understand,
    understand_judged,
    understand_match,
)
from atomtrain.data.examples import Examples
from atomtrain.data.labels import labels_in, understand_labelled
from atomtrain.data.material import (
    Draws,
    ExampleMaterial,
    Material,
    Mixture,
    PairMaterial,
    TextMaterial,
)
from atomtrain.data.picture_chat import PictureEncoder
from atomtrain.data.rows import SUFFIXES, Row, has_rows, read_rows
from atomtrain.data.sampler import Batch, joined
from atomtrain.data.tokenizer import Tokenizer
from atomtrain.data.tokens import cached_tokenizer, open_tokens
from atomtrain.data.weighted import parse_weighted
from atomtrain.errors import DataError
from atomtrain.files import default_cache
from atomtrain.models import HuggingFaceConfig, Sizes
from atomtrain.models.heads import numbers_of_labels, padding_of
from atomtrain.models.processor import Processor
from atomtrain.progress import Progress

Learns = Literal["answers", "pairs", "labels", "classes", "matches"]
"""What rows must say."""
_KEYS = {
    "pairs": "chosen and rejected",
    "labels": "prompt, completion and label",
    "classes": "text and label",
    "matches": "query and positive",
}
_Understood = TypeVar("_Understood")
_WANTED = {
    "classes": ("a text and a label", "lack a text or a label"),
    "matches": ("a query and a positive", "lack one of both texts"),
}
_FROM = {"classes": "classes are learnt from", "matches": "embeddings are learnt from"}
_JUDGED_SEQUENCES = 8
"""Enough to tell poison from chance, few enough to be a small part of a step."""


class Text(NamedTuple):
    """What is trained on."""

    data: tuple[str, ...]
    """Sources as the user named them; none is the demo corpus."""
    validation: str | None
    """What the loss is measured on; `None`: what the data hold out."""
    sha256: str
    tokenizer: Tokenizer
    material: Mixture
    skipped_rows: int = 0
    """Rows that have no answer."""
    skipped: str | None = None
    """What is to be told of them."""
    sees_images: bool = False
    """Whether rows have images."""

    @property
    def named(self) -> str:
        return ", ".join(self.data) or "the demo corpus"

    def largest(self, context: int, sequences: int) -> Batch:
        """Return sequences whose images have most tokens, of data with images, judged ones too."""
        judged = self.material.validation
        sources = [*self.material.sources, *(() if judged is None else (judged,))]
        known = [source for source in sources if isinstance(source, ExampleMaterial)]
        parts = [part for source in known for part in source.parts(context)]
        found = joined([part.batch(part.largest(sequences)) for part in parts])
        look = known[0].look
        assert look is not None
        tokens = (found.inputs == look.image_number).sum(-1)
        return found.part(tokens.argsort(descending=True, stable=True)[:sequences])


class _Answered:
    """The rows of data that have an answer; the others are counted."""

    def __init__(self, data: str, learns: Learns) -> None:
        self._data = data
        self._has, self._lacks = _WANTED.get(learns, ("an answer", "have no answer"))
        self._rows = self.skipped_rows = 0
        self._first: str | None = None

    def through(self, understood: Callable[[Row], _Understood]) -> Iterator[_Understood]:
        """Yield what each row says.

        Raises:
            DataError: none has an answer.
        """
        with Progress(f"reading {self._data}", None, "rows") as progress:
            for row in read_rows(self._data):
                self._rows += 1
                progress.advance()
                try:
                    said = understood(row)
                except NoAnswerError as error:
                    self.skipped_rows += 1
                    self._first = self._first or str(error)
                else:
                    yield said
        if self._first is not None and self.skipped_rows == self._rows:
            raise DataError(
                f"none of the {self._rows} rows of {self._data} has {self._has} (the first: "
                f"{self._first}); add some, or name other files with --data"
            )

    @property
    def told(self) -> str | None:
        """One line for the user, if rows were skipped."""
        if self._first is None:
            return None
        return (
            f"{self.skipped_rows} of {self._rows} rows of {self._data} {self._lacks} and are "
            f"skipped (the first: {self._first})"
        )


def read_text(
    data: Sequence[str],
    sizes: Sizes,
    tokenizer: Tokenizer | None,
    *,
    packed: bool = False,
    learns: Learns = "answers",
    validation: str | None = None,
) -> Text:
    """Return what the user named, as tokens.

    Args:
        data: Sources, each possibly with a weight: text files, or files of rows, all of one kind;
            none is the demonstration corpus.
        sizes: The model's; a Hugging Face model has a chat template among its files.
        tokenizer: `None` trains one on the text.
        packed: Whether a sequence may hold several rows; they, and documents of running text, do
            not see each other then.
        learns: Whether each row has answers, says which of two is the better one, or labels one;
            or has a text of one of the classes that the model knows, or two texts that belong
            together.
        validation: What the loss is measured on; then no part of the data is held out.

    Raises:
        DataError: something cannot be read or learnt, no row has an answer, or the sources are not
            of one kind; names the file, and the line if there is one.
    """
    sources = [parse_weighted(given) for given in data]
    specs = [source.spec for source in sources]
    rows = _are_rows(specs, validation, learns)
    _check_images(sizes, specs, rows=rows, learns=learns)
    reader = _Reader(sizes, tokenizer, packed, learns)
    hold_out: HoldOut = "some" if validation is None else "none"
    if not rows or not isinstance(sizes, HuggingFaceConfig):
        read = reader.running(specs or [None], validation, hold_out, rows=rows)
    else:
        reader.look_for_images([*specs, *([] if validation is None else [validation])])
        read = [reader.examples(spec, hold_out) for spec in specs]
        read += [] if validation is None else [reader.examples(validation, "all")]
    materials, checksums = zip(*read, strict=True)
    judged = None if validation is None else materials[-1]
    assert reader.tokenizer is not None
    weights = tuple(source.weight for source in sources) or (1.0,)
    return Text(
        tuple(data),
        validation,
        checksums[0]
        if len(checksums) == 1
        else hashlib.sha256(" ".join(checksums).encode()).hexdigest(),
        reader.tokenizer,
        Mixture(materials[: len(weights)], weights, judged),
        sum(answered.skipped_rows for answered in reader.answered),
        "; ".join(filter(None, (answered.told for answered in reader.answered))) or None,
        reader.sees_images,
    )


def _check_images(sizes: Sizes, specs: Sequence[str], *, rows: bool, learns: Learns) -> None:
    """Refuse what a model that reads images does not learn from."""
    if getattr(sizes, "needs_images", False) and (not rows or learns != "answers"):
        raise DataError(
            f"{', '.join(specs) or 'the demo corpus'} has {_KEYS.get(learns, 'running text')}, and "
            "the model reads images; give rows with messages that have texts and images"
        )


def _are_rows(specs: Sequence[str], validation: str | None, learns: Learns) -> bool:
    """Return whether all sources are rows, or none is.

    Raises:
        DataError: some are, or there must be rows.
    """
    rows = bool(specs) and has_rows(specs[0])
    for flag, spec in [*(("--data", s) for s in specs[1:]), ("--validation", validation)]:
        if spec is not None and has_rows(spec) != rows:
            kinds = ("running text", "rows")
            raise DataError(
                f"{flag} {spec} has {kinds[not rows]}, and {specs[0] if specs else 'the demo'} has "
                f"{kinds[rows]}; give files of one kind"
            )
    if learns != "answers" and not rows:
        what = _FROM.get(learns, "answers to compare are in")
        raise DataError(
            f"{', '.join(specs) or 'the demo corpus'} is running text; {what} rows with "
            f"{_KEYS[learns]}: name files with --data that end in {', '.join(SUFFIXES)}"
        )
    return rows


def read_labels(data: Sequence[str]) -> list[str]:
    """Return the labels of all rows that the user named, in their order (see `labels_in`).

    Raises:
        DataError: a file cannot be read, or has no rows with text and label, or one label only.
    """
    specs = [parse_weighted(given).spec for given in data]
    _are_rows(specs, None, "classes")
    answered = (_Answered(spec, "classes").through(understand_labelled) for spec in specs)
    return labels_in(itertools.chain.from_iterable(answered), ", ".join(data))


class _Reader:
    """Reads sources, all in one way; each becomes a material and the checksum of what it says."""

    def __init__(
        self, sizes: Sizes, tokenizer: Tokenizer | None, packed: bool, learns: Learns
    ) -> None:
        self.tokenizer = tokenizer
        self.answered: list[_Answered] = []
        self.sees_images = False
        """Whether all rows have images, those of every source: batches hold rows of several."""
        self._pictures: PictureEncoder | None = None
        self._sizes, self._packed, self._learns = sizes, packed, learns

    def running(
        self, specs: Sequence[str | None], validation: str | None, hold_out: HoldOut, *, rows: bool
    ) -> list[tuple[Material, str]]:
        """Return running text, or rows that are texts; the tokenizer is trained on all of it."""
        read = self._texts if rows else read_corpus
        corpora = [read(spec) for spec in specs]
        if self.tokenizer is None:
            whole = corpora[0]
            if len(corpora) > 1:
                documents = tuple(d for corpus in corpora for d in corpus.documents)
                whole = Corpus(name="all sources", documents=documents)
            self.tokenizer = cached_tokenizer(whole, self._sizes.vocabulary, default_cache())
        found = [self._tokens(corpus, hold_out) for corpus in corpora]
        return found + ([] if validation is None else [self._tokens(read(validation), "all")])

    def examples(self, spec: str, hold_out: HoldOut) -> tuple[Material, str]:
        """Return rows with answers."""
        assert self.tokenizer is not None
        assert isinstance(self._sizes, HuggingFaceConfig)
        encoder = Encoder(self.tokenizer, ChatTemplate(self._sizes.files))
        separator, answered = self.tokenizer.separator, self._answered(spec)
        if self.sees_images:
            return self._with_pictures(spec, answered, hold_out)
        if self._sizes.labels is not None or self._sizes.embeds:  # they look before the padding
            separator = padding_of(self._sizes.config, separator)
        material: ExampleMaterial | PairMaterial
        if self._learns == "classes":
            known = numbers_of_labels(self._sizes.labels or ())
            labelled = (
                encoder.encode_labelled(said, known, separator)
                for said in answered.through(understand_labelled)
            )
            examples = Examples(labelled, spec, 1, hold_out)
            material = ExampleMaterial(examples, packed=False, padding=separator)
        elif self._learns == "labels":
            judged = encoder.encode_judged(answered.through(understand_judged))
            material = PairMaterial(Examples(judged, spec, 2, hold_out), separator)
        elif self._learns == "matches":
            matches = (
                encoder.encode_match(said, separator) for said in answered.through(understand_match)
            )
            both = itertools.chain.from_iterable(matches)
            material = PairMaterial(Examples(both, spec, 2, hold_out), separator)
        elif self._learns == "pairs":
            both = itertools.chain.from_iterable(answered.through(encoder.encode_pair))
            material = PairMaterial(Examples(both, spec, 2, hold_out), separator)
        else:
            examples = Examples(answered.through(encoder.encode), spec, 1, hold_out)
            material = ExampleMaterial(examples, self._packed, separator)
        return material, material.examples.counts.sha256

    def look_for_images(self, specs: Sequence[str]) -> None:
        """Find out whether the model needs images, or the first row of a source names one.

        Raises:
            DataError: it does, and rows are to be packed.
        """
        assert isinstance(self._sizes, HuggingFaceConfig)
        self.sees_images = self._sizes.needs_images
        if not self._sizes.reads_images or self._learns != "answers" or self.sees_images:
            return
        for spec in specs:
            first = next(iter(read_rows(spec)), None)
            if first is not None and names_images(first):
                if self._packed:
                    raise DataError(f"{spec} has images, and --packing is for texts; leave it out")
                self.sees_images = True

    def _with_pictures(
        self, spec: str, answered: _Answered, hold_out: HoldOut
    ) -> tuple[Material, str]:
        assert self.tokenizer is not None
        assert isinstance(self._sizes, HuggingFaceConfig)
        if self._pictures is None:  # one for all sources, whose images are to be alike
            template = ChatTemplate(self._sizes.files)
            processor = Processor(self._sizes, self.tokenizer.to_json())
            self._pictures = PictureEncoder(self.tokenizer, template, processor)
        examples = Examples(answered.through(self._pictures.encode), spec, 1, hold_out)
        look, padding = self._pictures.look, self.tokenizer.separator
        material = ExampleMaterial(examples, packed=False, padding=padding, look=look)
        return material, examples.counts.sha256

    def _texts(self, spec: str | None) -> Corpus:
        assert spec is not None
        return corpus_of_texts(spec, list(self._answered(spec).through(_text_only)))

    def _tokens(self, corpus: Corpus, hold_out: HoldOut) -> tuple[Material, str]:
        assert self.tokenizer is not None
        tokens = open_tokens(corpus, self.tokenizer, default_cache(), hold_out)
        separator = self.tokenizer.separator if self._packed else None
        return TextMaterial(tokens, separator), corpus.sha256

    def _answered(self, spec: str) -> _Answered:
        self.answered.append(_Answered(spec, self._learns))
        return self.answered[-1]


def own_text(material: Mixture, sampler: Draws, context: int, micro_batch: int) -> Batch:
    """Return the few sequences by which a peer judges what others give, always the same ones.

    They are held out; where too little is for one sequence, they come from what is trained on.
    """
    count = max(1, -(-_JUDGED_SEQUENCES // micro_batch))
    try:
        return joined(list(material.held_out(context, micro_batch, count)))
    except DataError:
        return sampler.batch(0).part(slice(count * micro_batch))


def has_pairs(data: Sequence[str]) -> bool:
    """Return whether the first row of data says which of two answers is the better one."""
    if not data or not has_rows(spec := parse_weighted(data[0]).spec):
        return False
    first = next(iter(read_rows(spec)), None)
    return first is not None and is_pair(first)


def _text_only(row: Row) -> str:
    said = understand(row)
    if not isinstance(said, Plain) or said.kind != "text":
        raise DataError(
            f"{row.place}: is of kind {said.kind!r}, which needs a trained model; name the "
            "folder of one with --model, or give rows with text"
        )
    return said.answer
