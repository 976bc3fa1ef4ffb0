"""Folders in the published form of their family: read, trained and written again, bit for bit."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.checkpoint import open_checkpoint
from atomtrain.cli.main import main
from atomtrain.errors import DataError
from atomtrain.models.hugging_face import build, read_config
from atomtrain.models.weights.files import WeightFiles
from atomtrain.training.setup.loading import Weights
from tests.support.hugging_face_models import MIXTURES, saved_tensors, write_model, write_text

pytest.importorskip("transformers")


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model, told = load(folder, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return model.eval()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("kind", MIXTURES)
def test_what_is_read_is_what_transformers_loads(kind: str, original: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", MIXTURES[kind], shard="20KB")
    if not original:  # as the modules hold them
        for file in (tmp_path / "model").glob("model*"):
            file.unlink()
        model.save_pretrained(tmp_path / "model", save_original_format=False)
    expected = loaded(tmp_path / "model").state_dict()
    sizes = read_config(tmp_path / "model")
    weights = Weights(tmp_path / "model", sizes)
    empty = build(sizes)
    for parameter in empty.parameters():
        parameter.data.fill_(float("nan"))
    weights.fill(empty)
    found = empty.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        if name in weights.names:
            assert torch.equal(weights.read(name), tensor), name


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "mixtral", "granitemoehybrid", "deepseek_v3", "jamba"]
)
def test_a_step_is_exported_in_the_form_that_was_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, text = tmp_path / kind, write_text(tmp_path / "text.txt")
    write_model(folder, MIXTURES[kind])
    assert main([
        "train", "--model", str(folder), "--data", str(text), "--run", "mine", "--steps", "1",
        "--host", "127.0.0.1", "--device", "emulated:4GiB/s", "--device-memory", "16MiB",
        "--context", "16", "--sequences", "2", "--plain", "--no-profile", "--threads", "1",
        "--evaluate-every", "100",
    ]) == 0  # fmt: skip
    run = Path("runs/mine/peer-0")
    assert main(["export", str(run), "out", "--shard-size", "30KB"]) == 0
    before, after = stored(folder), stored(Path("out"))
    assert after.keys() == before.keys()
    assert all(after[name].shape == tensor.shape for name, tensor in before.items())
    assert any(not after[name].equal(tensor) for name, tensor in before.items())

    again = loaded(Path("out"))
    trained = saved_tensors(run)
    expected = loaded(folder)
    with torch.no_grad():
        for name, tensor in expected.state_dict().items():
            if f"{name}/parameter" in trained:
                tensor.copy_(trained[f"{name}/parameter"])
        rows = torch.arange(12)[None]
        assert torch.equal(again(rows).logits, expected(rows).logits)
    assert sum(f"{name}/parameter" in trained for name, _ in expected.named_parameters()) == len(
        list(expected.named_parameters())
    )
    assert open_checkpoint(run).step == 1


def test_memory_holds_the_pieces_of_one_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in what the files' reader gave and is still alive."""
    write_model(tmp_path, MIXTURES["mixtral"], shard="20KB")
    sizes = read_config(tmp_path)
    weights, empty = Weights(tmp_path, sizes), build(sizes)
    alive: dict[int, int] = {}
    peaks: list[int] = []
    read = WeightFiles.read

    def counted(self: WeightFiles, name: str) -> torch.Tensor:
        tensor = read(self, name)
        alive[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, alive.pop, id(tensor))
        peaks.append(sum(alive.values()))
        return tensor

    monkeypatch.setattr(WeightFiles, "read", counted)
    weights.fill(empty)
    largest = max(p.nbytes for name, p in empty.named_parameters() if "experts" in name)
    assert peaks
    assert max(peaks) == largest
    assert largest < sum(p.nbytes for p in empty.parameters()) / 4


def test_loading_peaks_at_a_tenth_above_the_model(tmp_path: Path) -> None:
    """Every storage counts, what is assembled too; layers enough that one is a small part."""
    write_model(tmp_path, {**MIXTURES["mixtral"], "num_hidden_layers": 24}, shard="20KB")
    sizes = read_config(tmp_path)
    weights, empty = Weights(tmp_path, sizes), build(sizes)
    held = sum(parameter.nbytes for parameter in empty.parameters())
    largest = max(p.nbytes for name, p in empty.named_parameters() if "experts" in name)
    with StorageTracker() as tracker:
        for parameter in empty.parameters():
            tracker.adopt(parameter.detach())
        assert tracker.live_bytes == held
        tracker.reset_peak()
        weights.fill(empty)
        assert tracker.live_bytes == held
    assert held + largest < tracker.peak_bytes <= held + 2 * largest
    assert tracker.peak_bytes <= 1.1 * held


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, MIXTURES["mixtral"])
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    gone = next(name for name in sorted(whole) if ".experts.2.w1" in name)
    save_file({name: tensor for name, tensor in whole.items() if name != gone}, file)
    with pytest.raises(DataError) as refused:
        Weights(tmp_path, read_config(tmp_path))
    said = str(refused.value)
    assert f"lack {gone!r}, of which 'model.layers." in said
    assert said.endswith("Give a complete copy of the model")
    assert "\n" not in said
