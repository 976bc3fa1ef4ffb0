"""Data sets by name: what may be written, and what the package `datasets` gives without a net."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atomtrain.data.named import Named, is_named, parse_named
from atomtrain.data.rows import has_rows, read_rows
from atomtrain.errors import DataError

WRITTEN = {
    "datasets:org/name": Named("org/name", None, "train", ("", ""), False),
    "datasets:org/name:test": Named("org/name", None, "test", ("", ""), False),
    "datasets:org/name:main:test": Named("org/name", "main", "test", ("", ""), False),
    "stream:./here:train[:20]": Named("./here", None, "train", ("", "20"), True),
    "stream:here[:1]": Named("here", None, "train", ("", "1"), True),
    "stream:here[5:]": Named("here", None, "train", ("5", ""), True),
    "datasets:here:train+test": Named("here", None, "train+test", ("", ""), False),
    "datasets:here:a:train[:10%]": Named("here", "a", "train", ("", "10%"), False),
    "datasets:here[3:50%]": Named("here", None, "train", ("3", "50%"), False),
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("HF_HOME", str(cache))
        patch.setenv("HF_HUB_OFFLINE", "1")
        package = pytest.importorskip("datasets")
        patch.setattr(package.config, "HF_DATASETS_CACHE", cache)
        patch.setattr(package.config, "HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield package


@pytest.mark.slow
@pytest.mark.parametrize("spec", WRITTEN)
def test_what_is_written_is_understood(spec: str, datasets: Any) -> None:
    assert is_named(spec)
    assert parse_named(spec) == WRITTEN[spec]


@pytest.mark.parametrize(
    "rest",
    ["", ":train", "a:b:c:d", "a:", "a[:0]", "a[:0%]", "a[5:3]", "a[2:2]", "a[90%:10%]", "a[:200%]",
     "a[-5:]", "a[3]", "a[:2]:train"],
)  # fmt: skip
def test_what_cannot_be_understood_is_refused(rest: str, datasets: Any) -> None:
    with pytest.raises(DataError, match=r"is not written as stream:NAME, stream:NAME:SPLIT or"):
        parse_named(f"stream:{rest}")


def test_percents_of_a_stream_are_refused(datasets: Any) -> None:
    with pytest.raises(DataError, match=r"a stream has is not known; .* write datasets:a\[:10%\]"):
        parse_named("stream:a[:10%]")


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"needs the package datasets; .*'atomtrain\[data\]'"):
        parse_named("datasets:org/name")


def texts(spec: str) -> list[str]:
    return [row.values["text"] for row in read_rows(spec)]


def test_files_of_a_folder_are_read_by_split(tmp_path: Path, datasets: Any) -> None:
    folder = tmp_path / "named"
    folder.mkdir()
    for split, words in (("train", ["one", "two", "three"]), ("test", ["four"])):
        lines = [json.dumps({"text": word}) for word in words]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    for prefix in ("datasets", "stream"):
        name = f"{prefix}:{folder}"
        assert has_rows(name)
        assert texts(name) == ["one", "two", "three"]
        assert texts(f"{name}:test") == ["four"]
        assert texts(f"{name}:train[:2]") == ["one", "two"]
        assert texts(f"{name}:train[1:9]") == ["two", "three"]
        assert [row.place for row in read_rows(f"{name}:test")] == [f"{folder}: row 1"]
        for wrong in (f"{name}:dev", f"{name}:other:train", f"{prefix}:{tmp_path / 'missing'}"):
            with pytest.raises(DataError, match="cannot be loaded"):
                texts(wrong)


def test_percents_are_those_of_the_package(tmp_path: Path, datasets: Any) -> None:
    lines = [json.dumps({"text": str(number)}) for number in range(37)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    for part in ("[:10%]", "[10%:]", "[30%:70%]", "[97%:]"):
        theirs = datasets.load_dataset(str(tmp_path), split=f"train{part}")["text"]
        assert texts(f"datasets:{tmp_path}:train{part}") == list(theirs)


def test_subsets_and_parquet(tmp_path: Path, datasets: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    for subset in ("small", "large"):
        (tmp_path / subset).mkdir()
        table = pyarrow.Table.from_pylist([{"messages": turns, "id": subset}])
        parquet.write_table(table, tmp_path / subset / "train-00000-of-00001.parquet")
    front = "---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files: {name}/*.parquet\n" for name in ("small", "large")
    )
    (tmp_path / "README.md").write_text(front + "---\n")
    for prefix in ("datasets", "stream"):
        [row] = read_rows(f"{prefix}:{tmp_path}:large:train")
        assert (row.values["id"], row.values["messages"]) == ("large", turns)
        with pytest.raises(DataError, match="cannot be loaded"):
            list(read_rows(f"{prefix}:{tmp_path}"))  # which of the two?
    assert [row.values["id"] for row in read_rows(str(tmp_path))] == ["large", "small"]


def test_what_was_saved_is_read_in_place(tmp_path: Path, datasets: Any) -> None:
    made = {split: datasets.Dataset.from_dict({"text": [split, "x"]}) for split in ("train", "b")}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "all")
    made["b"].save_to_disk(tmp_path / "one")
    assert texts(f"datasets:{tmp_path / 'all'}") == ["train", "x"]
    assert texts(f"stream:{tmp_path / 'all'}:b[:1]") == ["b"]
    assert texts(f"datasets:{tmp_path / 'one'}") == ["b", "x"]
    with pytest.raises(DataError, match="has no split 'c'; it has train, b"):
        texts(f"datasets:{tmp_path / 'all'}:c")
    with pytest.raises(DataError, match="was saved without subsets"):
        texts(f"datasets:{tmp_path / 'all'}:a:b")


def test_a_hub_out_of_reach_is_asked_once(monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    asked, offline = [], []

    def nobody(_: Any, name: str, **__: Any) -> None:
        asked.append(name)
        raise ConnectionError("no way there")

    def load(name: str, *_: Any, **__: Any) -> Any:
        offline.append((constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        if name == "org/cached":
            return [{"text": "kept"}]
        raise FileNotFoundError("not in the cache")

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", nobody)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts("datasets:org/cached") == ["kept"]
    with pytest.raises(DataError, match=r"not in the cache.*cannot be reached \(no way there"):
        texts("stream:org/name")
    assert asked == ["org/cached", "org/name"]
    assert offline == [(True, True)] * 2
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)
