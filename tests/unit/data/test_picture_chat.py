"""Rows with pictures: what is learnt of them, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain.data.chat import ChatTemplate, Encoder
from atomtrain.data.dialogues import names_images
from atomtrain.data.examples import IGNORED, Examples, Rows
from atomtrain.data.picture_chat import PictureEncoder
from atomtrain.data.rows import Row, read_rows
from atomtrain.data.tokenizer import read_tokenizer
from atomtrain.errors import ConfigError, DataError
from atomtrain.models.hugging_face import read_config
from atomtrain.models.processor import Processor
from tests.support.image_models import FEATURES, row_about, write_chats, write_llava

hf = pytest.importorskip("transformers")
Made = dict[str, Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    write_llava(folder / "model", layers=1)
    write_chats(folder / "data")
    return folder


@pytest.fixture
def encoder(place: Path) -> PictureEncoder:
    sizes, tokenizer = read_config(place / "model"), read_tokenizer(place / "model")
    processor = Processor(sizes, tokenizer.to_json())
    return PictureEncoder(tokenizer, ChatTemplate(sizes.files), processor)


def test_rows_are_what_the_models_own_processor_makes(place: Path, encoder: PictureEncoder) -> None:
    processor = hf.AutoProcessor.from_pretrained(place / "model", backend="pil")
    rows = list(read_rows(str(place / "data" / "chats.jsonl")))
    examples = Examples(map(encoder.encode, rows), "chats", hold_out="none")
    laid = Rows(examples.train, 64, packed=False, padding=257, look=encoder.look)
    batch = laid.batch(range(len(rows)))
    assert batch.images is not None
    for row, ids, labels, images in zip(
        rows, batch.inputs, batch.labels, batch.images.rows, strict=True
    ):
        asking, answer = row.values["messages"]
        (image, text) = asking["content"]
        (name,) = (value for key, value in image.items() if key != "type")
        image = {"type": "image", "path": str(place / "data" / name)}
        messages = [{**asking, "content": [image, text]}, answer]
        asked, whole = (
            processor.apply_chat_template(
                said, tokenize=True, return_dict=True, return_tensors="pt",
                add_generation_prompt=len(said) == 1,
            )
            for said in (messages[:1], messages)
        )  # fmt: skip
        expected = whole["input_ids"][0]
        assert ids[: len(expected)].tolist() == expected.tolist()
        assert int((ids == encoder.look.image_number).sum()) == FEATURES
        assert torch.equal(images["pixel_values"], whole["pixel_values"])
        counted = labels != IGNORED
        first = asked["input_ids"].shape[1]
        assert counted.nonzero().flatten().tolist() == list(range(first - 1, len(expected) - 1))
        assert torch.equal(labels[counted], expected[first:])


def test_a_picture_is_processed_once_while_a_row_is_read(
    place: Path, encoder: PictureEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = encoder._reader._made.image_processor  # type: ignore[attr-defined]
    original, calls = type(images).preprocess, []

    def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(images), "preprocess", preprocess)
    encoder.encode(Row("row", row_about("pictures/0.png"), place / "data"))
    assert len(calls) == 1


def test_a_row_whose_picture_is_cut_off_is_dropped(place: Path, encoder: PictureEncoder) -> None:
    row = {"messages": [
        {"role": "user", "content": "red?"}, {"role": "assistant", "content": "yes"},
        *row_about("pictures/1.png")["messages"],
    ]}  # fmt: skip
    made = encoder.encode(Row("late", row, place / "data"))
    short = encoder.encode(Row("short", row_about("pictures/0.png"), place / "data"))
    last = max(i for i, t in enumerate(made.tokens) if t == encoder.look.image_number)
    examples = Examples([made, short], "both", hold_out="none")
    for context, dropped in ((last, 1), (last + 1, 0)):
        rows = Rows(examples.train, context, packed=False, padding=257, look=encoder.look)
        assert rows.dropped == dropped


def bomb(folder: Path) -> Made:
    from PIL import Image

    Image.new("1", (10_000, 9_000)).save(folder / "large.png")
    return row_about("large.png")


def strip(folder: Path) -> Made:
    from PIL import Image

    Image.new("1", (300_000, 1)).save(folder / "strip.png")
    return row_about("strip.png")


def half(folder: Path) -> Made:
    whole = (folder / "pictures" / "1.png").read_bytes()
    (folder / "half.png").write_bytes(whole[: len(whole) // 2])
    return row_about("half.png")


def script(folder: Path) -> Made:
    (folder / "script.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    return row_about("script.eps")


def asking(item: Made) -> Callable[[Path], Made]:
    def make(_: Path) -> Made:
        row = row_about("pictures/1.png")
        row["messages"][0]["content"].append(item)
        return row

    return make


def in_an_answer(_: Path) -> Made:
    row = row_about("pictures/1.png")
    row["messages"][1]["content"].append({"type": "image", "path": "pictures/2.png"})
    return row


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (bomb, "large.png has more than 89478485 pixels"),
        (strip, "300000 x 1 pixels is too long to have its shorter side resized to 16"),
        (half, "half.png cannot be opened"),
        (script, "script.eps cannot be opened (cannot identify image file); give"),
        (asking({"type": "text", "text": "or <image>?"}), "has 1 image, and <image> stands 2"),
        (asking({"type": "image"}), "is an image without path or image or url"),
        (asking({"type": "video", "path": "a.mp4"}), "of type 'video'; allowed are text and"),
        (in_an_answer, "is an answer with an image"),
        (lambda _: row_about("pictures/none.png"), "there is no image"),
        (lambda _: row_about("iVBORw0K" * 9999), "iVBORw0K; restore it, or take the row out"),
        (lambda _: row_about("https://example.org/1.png"), "is an address, and nothing is fetched"),
        (lambda _: row_about("data:image/png;base64,AA"), "is an address, and nothing is fetched"),
        (lambda _: row_about("../model/1.png"), "is not named from the folder of the data"),
        (lambda _: row_about("/etc/1.png"), "is not named from the folder of the data"),
        (lambda _: row_about(), "has no image, and the model reads images"),
        (lambda _: {"prompt": "a", "completion": "b"}, "is a text; the model reads images"),
        (
            lambda _: row_about("pictures/1.png", "pictures/2.png"),
            "has 2 images, and first has 1",
        ),
    ],
)
def test_a_row_that_cannot_be_seen_is_refused(
    place: Path, encoder: PictureEncoder, make: Callable[[Path], Made], told: str
) -> None:
    encoder.encode(Row("first", row_about("pictures/0.png"), place / "data"))
    with pytest.raises(DataError) as found:
        encoder.encode(Row("second", make(place / "data"), place / "data"))
    assert str(found.value).startswith("second: ")
    assert told in str(found.value)
    assert "\n" not in str(found.value)


def test_a_row_of_pictures_that_memory_might_not_hold_is_refused(
    place: Path, encoder: PictureEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("many", row_about(*["pictures/0.png"] * 1000), place / "data")
    monkeypatch.setattr("atomtrain.data.pictures._MOST_ROW_PIXELS", 2000)
    with pytest.raises(DataError, match=r"many: its first [0-9] images have .* pixels together"):
        encoder.encode(row)


def test_images_of_data_without_a_folder_are_refused(encoder: PictureEncoder) -> None:
    with pytest.raises(DataError, match="the data are not a file"):
        encoder.encode(Row("named", row_about("pictures/0.png")))


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        (row_about("a.png")["messages"], True),
        ([{"role": "user", "content": "a.png"}], False),
        ([{"content": [{"type": "text", "text": "image"}, "image"]}, "image"], False),
        (5, False),
        (None, False),
    ],
)
def test_whether_a_row_names_an_image_is_told_whatever_it_holds(messages: Any, names: bool) -> None:
    assert names_images(Row("row", {"messages": messages})) is names


def test_a_model_of_texts_takes_no_images(place: Path, encoder: PictureEncoder) -> None:
    sizes, tokenizer = read_config(place / "model"), read_tokenizer(place / "model")
    texts = Encoder(tokenizer, ChatTemplate(sizes.files))
    with pytest.raises(DataError, match="where the model reads images and each row has one"):
        texts.encode(Row("row", row_about("pictures/0.png"), place / "data"))


def test_a_picture_that_has_changed_is_refused(place: Path, encoder: PictureEncoder) -> None:
    file = place / "data" / "changing.png"
    file.write_bytes((place / "data" / "pictures" / "1.png").read_bytes())
    made = encoder.encode(Row("row", row_about(file.name), place / "data"))
    file.write_bytes((place / "data" / "pictures" / "2.png").read_bytes())
    with pytest.raises(DataError, match="has changed since the run began"):
        encoder.look.images(made.pictures)


def test_a_template_that_leaves_something_out_is_refused(
    place: Path, encoder: PictureEncoder
) -> None:
    row = Row("row", row_about("pictures/0.png"), place / "data")
    template = encoder._template
    assert template.text is not None
    whole = template.text
    template.text = whole.replace("<image>", "")
    with pytest.raises(DataError, match="has 1 image, and <image> stands 0 times"):
        encoder.encode(row)
    template.text = whole.replace("{{ c['text'] }}", "")
    with pytest.raises(DataError, match="leaves out the text of message 0"):
        encoder.encode(row)


def test_the_template_of_an_older_processor_is_taken(place: Path, tmp_path: Path) -> None:
    import json
    import shutil

    shutil.copytree(place / "model", tmp_path / "old")
    template = tmp_path / "old" / "chat_template.jinja"
    expected = template.read_text()
    (tmp_path / "old" / "chat_template.json").write_text(json.dumps({"chat_template": expected}))
    template.unlink()
    file = tmp_path / "old" / "tokenizer_config.json"  # its template is of texts
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "{{ 'no' }}"}))
    assert ChatTemplate(read_config(tmp_path / "old").files).text == expected
    assert hf.AutoProcessor.from_pretrained(tmp_path / "old").chat_template == expected


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"image_token": "<s>"}, "puts token 256 .'<s>'. for images, and config.json says 259"),
        (
            {"image_processor": {"image_processor_type": "EvilProcessor"}},
            "'EvilProcessor', which the installed transformers does not have",
        ),
        (
            {"image_processor": {"image_processor_type": "CLIPImageProcessor", "size": 1 << 20}},
            "says size 1048576; numbers from 0 to 4096",
        ),
        *(
            (
                {
                    "image_processor": {
                        "image_processor_type": "CLIPImageProcessor",
                        "crop_size": {"height": side, "width": side},
                    }
                },
                "says crop_size .*; numbers from 0 to 4096",
            )
            for side in (6e3, "6000", float("nan"))
        ),
        ({"num_additional_image_tokens": 5_000_000}, "says num_additional_image_tokens 5000000"),
        ({"patch_size": -1}, "says patch_size -1"),
        ({"image_token": "<" + "o" * 1000}, "says image_token <ooo"),
        ({"image_processor": []}, "the model's image_processor_type is 'None'"),
        (None, "the model has no processor"),
    ],
)
def test_a_processor_that_cannot_be_is_refused(place: Path, settings: Any, told: str) -> None:
    import json

    sizes, tokenizer = read_config(place / "model"), read_tokenizer(place / "model")
    files = dict(sizes.files)
    said = json.loads(files.pop("processor_config.json"))
    if settings is not None:
        files["processor_config.json"] = json.dumps({**said, **settings})
        files["tokenizer_config.json"] = json.dumps({"eos_token": "</s>"})
    object.__setattr__(sizes, "files", files)
    with pytest.raises(ConfigError, match=told):
        Processor(sizes, tokenizer.to_json())


def test_more_tokens_than_a_row_can_have_are_not_made(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    sizes, tokenizer = read_config(place / "model"), read_tokenizer(place / "model")
    processor = Processor(sizes, tokenizer.to_json())
    picture = Image.new("RGB", (20, 20))
    assert processor.read("<image>", [picture]).tokens.count(processor.image_number) == FEATURES
    monkeypatch.setattr("atomtrain.models.processor._MOST_TOKENS", FEATURES - 1)
    with pytest.raises(DataError, match="images of 16 x 16 pixels have more than 15 patches of 4"):
        processor.read("<image>", [picture])


def test_pillow_is_asked_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, tokenizer = read_config(place / "model"), read_tokenizer(place / "model")
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"pip install 'atomtrain\[images\]'"):
        Processor(sizes, tokenizer.to_json())
