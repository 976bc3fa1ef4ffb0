"""Processors of models that cut images by their size: bounds on what a stranger's files say."""

from __future__ import annotations

import json
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from atomtrain.data.tokenizer import read_tokenizer
from atomtrain.errors import ConfigError, DataError
from atomtrain.models.hugging_face import HuggingFaceConfig, read_config
from atomtrain.models.processor import LEAST_FOR_IMAGES, Processor
from atomtrain.models.processor_files import kept_tokens
from tests.support import ROOT
from tests.support.vision_folders import FAMILIES, write_vision


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("families")
    for name in (
        "qwen2_5_vl",
        "idefics3",
        "gemma3",
        "smolvlm",
        "internvl",
        "llava_next",
        "mistral3",
    ):
        write_vision(made / name, name)
    return made


def processor_of(folder: Path, **settings: Any) -> Processor:
    """Return a folder's processor, its image processor with other settings."""
    sizes = read_config(folder)
    files = dict(sizes.files)
    whole = json.loads(files.get("processor_config.json", "{}"))
    images = whole.get("image_processor") or json.loads(files["preprocessor_config.json"])
    whole["image_processor"] = {**images, **settings}
    files["processor_config.json"] = json.dumps(whole)
    changed = HuggingFaceConfig(
        config=sizes.config, vocabulary=sizes.vocabulary, context=sizes.context,
        width=sizes.width, files=files,
    )  # fmt: skip
    return Processor(changed, read_tokenizer(folder).to_json())


def test_patches_are_as_many_as_a_picture_has_room_for(folders: Path) -> None:
    processor = processor_of(folders / "qwen2_5_vl")
    pictures = [Image.new("RGB", (16, 30)), Image.new("RGB", (40, 10))]
    asked = " and ".join([FAMILIES["qwen2_5_vl"].image] * 2)
    seen = processor.read(asked, pictures)
    grids = seen.images["image_grid_thw"]
    assert grids.tolist() == [[1, 8, 4], [1, 2, 10]]
    assert len(seen.images["pixel_values"]) == int(grids.prod(-1).sum()) == 52
    assert seen.tokens.count(processor.image_number) == 52 // 4
    again = processor.images(pictures)
    assert again.keys() == seen.images.keys()
    assert all(torch.equal(again[name], seen.images[name]) for name in again)


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("qwen2_5_vl", {"size": {"shortest_edge": 1, "longest_edge": 1 << 27}}, "numbers from 0"),
        ("qwen2_5_vl", {"temporal_patch_size": 4096, "max_pixels": 1 << 20}, "which is too much"),
        ("qwen2_5_vl", {"patch_size": 5000}, "says patch_size 5000"),
        ("qwen2_5_vl", {"temporal_patch_size": "ab"}, "says temporal_patch_size ab"),
        ("qwen2_5_vl", {"temporal_patch_size": [1, 2]}, "says temporal_patch_size .1, 2."),
        ("qwen2_5_vl", {"patch_size": 128, "merge_size": 128}, "images of 268435456 pixels"),
        ("idefics3", {"max_image_size": {"longest_edge": 1}}, "tiles of 1"),
        ("idefics3", {"max_image_size": 16}, "says max_image_size 16"),
        ("idefics3", {"do_resize": False}, "cuts images of any size into tiles"),
        ("gemma3", {"do_pan_and_scan": True}, "cuts images .do_pan_and_scan."),
        ("internvl", {"max_patches": 257}, "up to 257 tiles of 16 x 16 pixels"),
        ("internvl", {"max_patches": 9, "size": {"height": 4096, "width": 4096}}, "up to 9 tiles"),
        ("internvl", {"max_patches": "9"}, "says max_patches 9"),
        ("llava_next", {"image_grid_pinpoints": [[4096, 4096]]}, "up to 65536 tiles of 16 x 16"),
        ("llava_next", {"image_grid_pinpoints": [[16, 8192]]}, "says image_grid_pinpoints"),
        ("llava_next", {"image_grid_pinpoints": [[[16]]]}, "says image_grid_pinpoints"),
        ("mistral3", {"patch_size": {"height": {}}}, "says patch_size"),
    ],
)
def test_settings_that_make_pictures_huge_are_refused(
    folders: Path, name: str, settings: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        processor_of(folders / name, **settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [("spatial_merge_size", 4096), ("patch_size", {"height": 4}), ("patch_size", 4096)],
)
def test_patches_that_are_joined_to_huge_ones_are_refused(
    folders: Path, key: str, value: Any
) -> None:
    sizes = read_config(folders / "mistral3")
    said = {"patch_size": 4096, "spatial_merge_size": 4, key: value}
    if key == "spatial_merge_size":
        said["patch_size"] = 4
    files = {**sizes.files, "processor_config.json": json.dumps(said)}
    changed = HuggingFaceConfig(
        config=sizes.config, vocabulary=sizes.vocabulary, context=sizes.context,
        width=sizes.width, files=files,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"joins \d+ x \d+ patches of .*, which is too much"):
        Processor(changed, read_tokenizer(folders / "mistral3").to_json())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3", "gemma3"])
def test_more_patches_than_a_row_can_have_are_not_made(
    folders: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = processor_of(folders / name)
    monkeypatch.setattr("atomtrain.models.processor._MOST_TOKENS", 3)
    with pytest.raises(DataError, match="its images have more than 3 patches"):
        processor.images([Image.new("RGB", (16, 30))])


@pytest.mark.parametrize("name", ["idefics3", "gemma3", "mistral3"])
def test_a_strip_is_refused(folders: Path, name: str) -> None:
    with pytest.raises(DataError, match="65537 x 1 pixels has a side of more than 65536"):
        processor_of(folders / name).images([Image.new("1", (65537, 1))])


def test_a_token_that_would_make_a_huge_text_is_refused(folders: Path) -> None:
    files = dict(read_config(folders / "gemma3").files)
    said = json.loads(files["tokenizer_config.json"])
    files["tokenizer_config.json"] = json.dumps({**said, "image_token": "x" * 101})
    with pytest.raises(ConfigError, match=r"image_token of .*tokenizer_config.json has 101"):
        kept_tokens(files, {})


def test_a_picture_that_the_model_would_take_for_padding_is_refused(folders: Path) -> None:
    black = [Image.new("RGB", (16, 30))]
    assert processor_of(folders / "idefics3").images(black)["pixel_values"].any()
    with pytest.raises(DataError, match="nothing but zeros"):
        processor_of(folders / "idefics3", image_mean=[0, 0, 0]).images(black)


@pytest.mark.parametrize("value", [0, [0, 0, 0], [0.5, 0.0, 0.5]])
def test_settings_that_divide_pixels_by_zero_are_refused(folders: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"divides pixels by image_std .*give numbers above 0"):
        processor_of(folders / "qwen2_5_vl", image_std=value)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3", "gemma3", "smolvlm"])
def test_pixels_that_are_not_finite_are_refused(folders: Path, name: str) -> None:
    with pytest.raises(DataError, match="pixels of an image that are not finite"):
        processor_of(folders / name, image_std=1e-45).images([Image.new("RGB", (16, 30), "red")])


def test_a_package_that_a_processor_lacks_is_told(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "transformers.models.smolvlm.processing_smolvlm.num2words"
    monkeypatch.setattr(module, None)
    with pytest.raises(ConfigError, match=r"needs more: .*pip install num2words"):
        processor_of(folders / "smolvlm")


def test_who_needs_torchvision_is_told_so_beside_pixtral(folders: Path) -> None:
    if find_spec("torchvision") is not None:
        pytest.skip("torchvision is there")
    processor_of(folders / "mistral3")
    with pytest.raises(ModuleNotFoundError, match="torchvision"):
        import_module("transformers.models.pixtral.image_processing_pixtral")


def test_an_older_transformers_is_refused_in_one_line(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.19.1")
    told = r"reading images needs transformers 5\.20 or newer, not 5\.19\.1; .*atomtrain\[images\]"
    with pytest.raises(ConfigError, match=told):
        processor_of(folders / "gemma3")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    least = ".".join(map(str, LEAST_FOR_IMAGES))
    assert f"transformers>={least}" in project["optional-dependencies"]["images"]
