"""Checkpoints: what is saved comes back bit for bit; the newest are kept; arguments are checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atomtrain import checkpoint
from atomtrain.errors import CheckpointError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
]


def bits(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(loaded: Tensor, saved: Tensor) -> None:
    assert loaded.dtype == saved.dtype
    assert loaded.shape == saved.shape
    assert bits(loaded) == bits(saved)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def save_simple(folder: Path, step: int, **options: int) -> Path:
    shards = {"block": {"weight": torch.full((4,), float(step))}}
    return checkpoint.save(folder, step, shards, {"position": step * 10}, **options)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    shards: dict[str, dict[str, Tensor]] = {}
    for dtype in DTYPES:
        # One byte for bool: only 0 and 1 are its bit patterns.
        top = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, top, (6 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        shards[str(dtype)] = {
            "matrix": raw.view(dtype).reshape(2, 3),
            "scalar": raw.view(dtype)[0].clone(),
            "empty": torch.empty(0, 5, dtype=dtype),
        }
    shards["no tensors at all"] = {}
    path = checkpoint.save(tmp_path, 7, shards, {})
    loaded = dict(checkpoint.open_checkpoint(path).shards())
    assert list(loaded) == list(shards)
    for name, tensors in shards.items():
        assert list(loaded[name]) == list(tensors)
        for key, tensor in tensors.items():
            assert_same(loaded[name][key], tensor)


@given(raw=st.binary(min_size=4, max_size=64).filter(lambda b: len(b) % 4 == 0))
@settings(max_examples=25, deadline=None)
def test_any_bit_pattern_survives(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    path = checkpoint.save(tmp_path_factory.mktemp("bits"), 0, {"s": {"t": tensor}}, {})
    assert_same(checkpoint.open_checkpoint(path).shard("s")["t"], tensor)


def test_meta_texts_names_and_step_come_back(tmp_path: Path) -> None:
    meta = {"position": 3, "loss": 0.1 + 0.2, "peer": "ä", "plan": {"slots": [1, 2, None, True]}}
    texts = {"tokenizer.json": '{"a": "\u00e4\u2028\\n"}\r\n', "notes.txt": ""}
    shards = {"embedding": {"w": torch.zeros(2), "b": torch.zeros(1)}, "head": {"w": torch.ones(2)}}
    checkpoint.save(tmp_path, 12, shards, meta, texts)
    loaded = checkpoint.load_latest(tmp_path)
    assert (loaded.step, loaded.meta, loaded.texts) == (12, meta, texts)
    assert loaded.tensor_names == {"embedding": ("w", "b"), "head": ("w",)}
    assert loaded.path.name == "step-00000012"
    assert loaded.skipped == ()


def test_views_of_one_flat_buffer_and_transposed_tensors_are_saved(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {"a": flat[:6].view(2, 3), "b": flat[6:], "c": torch.arange(6.0).view(2, 3).t()}
    path = checkpoint.save(tmp_path, 1, {"segment": tensors}, {})
    loaded = checkpoint.open_checkpoint(path).shard("segment")
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


def test_a_parameter_is_saved_as_its_values(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    path = checkpoint.save(tmp_path, 1, {"s": {"w": parameter}}, {})
    loaded = checkpoint.open_checkpoint(path).shard("s")["w"]
    assert_same(loaded, parameter.detach())
    assert not loaded.requires_grad


def test_lazy_shards_are_written_before_the_next_is_asked_for(tmp_path: Path) -> None:
    seen: list[int] = []

    def produce() -> Iterator[tuple[str, dict[str, Tensor]]]:
        for index in range(3):
            seen.append(len(list(tmp_path.glob(".unfinished-*/*.safetensors"))))
            yield f"segment {index}", {"w": torch.full((2,), float(index))}

    checkpoint.save(tmp_path, 1, produce(), {})
    assert seen == [0, 1, 2]
    loaded = checkpoint.load_latest(tmp_path)
    assert [float(tensors["w"][0]) for _, tensors in loaded.shards()] == [0.0, 1.0, 2.0]


def test_a_producer_that_fails_leaves_nothing_and_its_own_error(tmp_path: Path) -> None:
    save_simple(tmp_path, 1)

    def produce() -> Iterator[tuple[str, dict[str, Tensor]]]:
        yield "first", {"w": torch.zeros(1)}
        raise FileNotFoundError("the producer's own trouble")

    with pytest.raises(FileNotFoundError, match="own trouble"):
        checkpoint.save(tmp_path, 2, produce(), {})
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (1, 2, 3, 4):
        save_simple(tmp_path, step, keep=keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in range(5 - keep, 5)]
    assert checkpoint.load_latest(tmp_path).step == 4


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    save_simple(tmp_path, 1)
    save_simple(tmp_path, 2)
    checkpoint.save(tmp_path, 2, {"block": {"weight": torch.zeros(1)}}, {"again": True})
    assert names(tmp_path) == ["step-00000001", "step-00000002.1"]
    assert checkpoint.load_latest(tmp_path).meta == {"again": True}


def test_after_going_back_the_newly_saved_step_is_the_newest(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save_simple(tmp_path, step, keep=3)
    save_simple(tmp_path, 150, keep=2)
    assert checkpoint.load_latest(tmp_path).step == 150
    assert names(tmp_path) == ["step-00000150", "step-00000300"]


def test_open_takes_a_directory_a_checkpoints_folder_or_a_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first = save_simple(folder, 1)
    save_simple(folder, 2)
    assert checkpoint.open_checkpoint(first).step == 1
    assert checkpoint.open_checkpoint(folder).step == 2
    assert checkpoint.open_checkpoint(tmp_path).step == 2
    renamed = first.rename(tmp_path / "my-model")
    assert checkpoint.open_checkpoint(renamed).step == 1


@pytest.mark.parametrize("names_in_folder", [[], ["config.json", "model.safetensors"]])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, names_in_folder: list[str]) -> None:
    for name in names_in_folder:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        checkpoint.open_checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.load_latest(tmp_path)


def test_shared_memory_is_refused_and_says_which(tmp_path: Path) -> None:
    tied = torch.zeros(4)
    with pytest.raises(CheckpointError, match=r"shard 'head' cannot be saved: .*share memory.*'b'"):
        checkpoint.save(tmp_path, 1, {"head": {"a": tied, "b": tied}}, {})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "tensor", [torch.empty(3, device="meta"), torch.zeros(2, 2).to_sparse()], ids=["meta", "sparse"]
)
def test_a_tensor_without_dense_data_is_refused(tmp_path: Path, tensor: Tensor) -> None:
    with pytest.raises(CheckpointError, match="shard 's' cannot be saved"):
        checkpoint.save(tmp_path, 1, {"s": {"t": tensor}}, {})
    assert names(tmp_path) == []


def test_the_name_that_safetensors_reserves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'s' has a tensor named '__metadata__'"):
        checkpoint.save(tmp_path, 1, {"s": {"__metadata__": torch.zeros(1)}}, {})
    assert names(tmp_path) == []


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match="step -1"):
        checkpoint.save(folder, -1, {}, {})
    with pytest.raises(CheckpointError, match="keep=0"):
        checkpoint.save(folder, 1, {}, {}, keep=0)
    for name in ("../evil", "manifest.json", ".hidden", "shard-00000.safetensors", ""):
        with pytest.raises(CheckpointError, match="cannot be a text file"):
            checkpoint.save(folder, 1, {}, {}, {name: "x"})
    assert not folder.exists()


def test_meta_that_is_not_json_and_repeated_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        checkpoint.save(tmp_path, 1, {}, {"tensor": torch.zeros(1)})
    twice = [("s", {"t": torch.zeros(1)}), ("s", {"t": torch.zeros(1)})]
    with pytest.raises(CheckpointError, match="'s' was given twice"):
        checkpoint.save(tmp_path, 1, twice, {})
    assert names(tmp_path) == []


def test_an_unknown_shard_is_refused_with_the_nearest(tmp_path: Path) -> None:
    loaded = checkpoint.open_checkpoint(save_simple(tmp_path, 1))
    with pytest.raises(CheckpointError, match="Did you mean 'block'"):
        loaded.shard("blok")


def test_a_second_writer_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    def produce() -> Iterator[tuple[str, dict[str, Tensor]]]:
        with pytest.raises(CheckpointError, match="being written by another save"):
            save_simple(tmp_path, 9)
        yield "s", {"w": torch.zeros(1)}

    checkpoint.save(tmp_path, 1, produce(), {})
    save_simple(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
