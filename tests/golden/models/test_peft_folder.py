"""Folders of adapters that peft or ATOM wrote: read with the bits of peft's own merge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atomtrain.cli.main import main
from atomtrain.errors import AtomError
from atomtrain.training.setup.peft_folder import ADAPTER_CONFIG, ADAPTER_FILE, read_peft
from atomtrain.training.setup.state import open_trained
from tests.support.hugging_face_models import (
    LLAMA,
    MIXTURES,
    UNTIED,
    saved_tensors,
    train_by_command,
    write_model,
    write_text,
)

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")
_BOTH = ["mlp.experts.gate_up_proj", "experts.down_proj"]
_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (UNTIED, {"target_modules": ["q_proj", "up_proj"], "lora_alpha": 5}),
    "dora": (UNTIED, {"target_modules": ["o_proj"], "use_dora": True}),
    "all linear": (UNTIED, {"target_modules": "all-linear", "use_rslora": True}),
    "saved": (
        UNTIED, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "model.norm"]},
    ),
    "router": (
        MIXTURES["qwen3_moe"], {"target_modules": ["q_proj"], "modules_to_save": ["mlp.gate"]},
    ),
    "experts": (MIXTURES["qwen3_moe"], {"target_modules": ["v_proj"], "target_parameters": _BOTH}),
    "one of two": (
        MIXTURES["mixtral"], {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]},
    ),
    "transposed": (MIXTURES["gpt_oss"], {"target_modules": [], "target_parameters": _BOTH}),
}  # fmt: skip


def written(folder: Path, config: dict[str, Any], asked: dict[str, Any]) -> Any:
    """Write a model, and adapters that peft made of it; return peft's model."""
    from transformers import AutoModelForCausalLM

    write_model(folder / "base", config)
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **asked))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "adapters")
    return model.eval()


@pytest.mark.parametrize("kind", _CASES)
def test_adapters_of_peft_are_read_with_the_bits_of_its_merge(kind: str, tmp_path: Path) -> None:
    model = written(tmp_path, *_CASES[kind])
    trained = open_trained(tmp_path / "adapters")
    merged = model.merge_and_unload().state_dict()
    found = trained.model.state_dict()
    assert found.keys() == merged.keys()
    changed = 0
    before = open_trained(tmp_path / "base").model.state_dict()
    for name, tensor in merged.items():
        assert torch.equal(found[name], tensor), name
        changed += not torch.equal(found[name], before[name])
    # Three layers of everything that is adapted.
    assert changed == 3 * {"linear": 2, "dora": 1, "all linear": 7, "experts": 3, "one of two": 1,
                           "transposed": 2, "saved": 1, "router": 2}[kind] + (
        2 if kind == "saved" else 0
    )  # fmt: skip


def test_the_commands_read_what_atom_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "base", MIXTURES["qwen3_moe"])
    text = write_text(tmp_path / "text.txt")
    assert main([
        "train", "--model", "base", "--data", str(text), "--run", "mine", "--steps", "1",
        "--host", "127.0.0.1", "--device", "emulated:4GiB/s", "--device-memory", "4MiB",
        "--context", "16", "--sequences", "2", "--plain", "--no-profile", "--threads", "1",
        "--evaluate-every", "100", "--learning-rate", "0.01",
        "--lora", "r=4,targets=all-linear+experts",
    ]) == 0  # fmt: skip
    assert main(["export", "runs/mine/peer-0", "adapters"]) == 0
    assert any("expert_lora" in key for key in saved_tensors(Path("runs/mine/peer-0")))
    ours = open_trained(Path("runs/mine/peer-0")).model.state_dict()
    for name, tensor in open_trained(Path("adapters")).model.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
    told = []
    for path in ("adapters", "runs/mine/peer-0"):
        capsys.readouterr()
        assert main(["evaluate", path, "--data", str(text), "--context", "16"]) == 0
        told.append(capsys.readouterr().out.replace(path, ""))
    assert told[0] == told[1]
    assert main(["generate", "adapters", "--tokens", "2"]) == 0


def _configured(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / ADAPTER_CONFIG
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def _stored(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_FILE)
        change(tensors)
        save_file(tensors, folder / ADAPTER_FILE)

    return apply


_DOWN = "base_model.model.model.layers.1.mlp.experts.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_configured(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (_configured(bias="all"), "bias='all'"),
        (_configured(init_lora_weights="pissa"), "pissa"),
        (_configured(peft_type="IA3"), "of the type LORA"),
        (_configured(r="four"), "cannot be used"),
        (_configured(r=2), "is right"),
        (_configured(target_parameters=7), "not names"),
        (_configured(modules_to_save="lm_head"), "not names"),
        (_configured(modules_to_save=["lm_head"]), "lacks 'base_model.model.lm_head.weight'"),
        (_configured(target_parameters=["experts.down_proj"]), "not an adapter"),
        (_configured(base_model_name_or_path="some/model"), "is not a folder here"),
        (_stored(lambda t: t.pop(_DOWN)), "lacks the lora_A.weight"),
        (_stored(lambda t: t.update(other=torch.ones(2))), "not an adapter"),
        (_stored(lambda t: t[_DOWN].fill_(float("nan"))), "not numbers"),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), "cannot be read"),
        (lambda folder: (folder / ADAPTER_FILE).unlink(), "cannot be read"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(
    change: Callable[[Path], Any], expected: str, tmp_path: Path
) -> None:
    written(tmp_path, *_CASES["experts"])
    change(tmp_path / "adapters")
    with pytest.raises(AtomError) as refused:
        read_peft(tmp_path / "adapters")
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_shared_weight_that_peft_trained_apart_is_refused(
    modules: list[str], tmp_path: Path
) -> None:
    """peft copies each module; two copies of one weight go ways of their own."""
    written(tmp_path, LLAMA, {"target_modules": ["q_proj"], "modules_to_save": modules})
    with pytest.raises(AtomError, match="apart from other uses of it"):
        read_peft(tmp_path / "adapters")


def test_several_adapters_of_one_model_are_told_apart_by_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of two runs, one of which trains a module itself, beside one another."""
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "base", UNTIED)
    text = write_text(tmp_path / "text.txt")
    asked = {"first": "r=4", "second": "r=2,targets=v_proj,modules_to_save=lm_head"}
    ids = torch.arange(12)[None]
    expected = {}
    for name, lora in asked.items():
        run = train_by_command(
            Path("base"), text, name, "--lora", lora, memory="2MiB", sequences=2, steps=2
        )
        assert main(["export", str(run), name]) == 0
        with torch.no_grad():
            expected[name] = open_trained(run).model(ids).logits
    base: Any = AutoModelForCausalLM.from_pretrained("base")
    model = peft.PeftModel.from_pretrained(base, "first", adapter_name="first")
    model.load_adapter("second", "second")
    for name, logits in expected.items():
        model.set_adapter(name)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(ids).logits, logits)
    assert not torch.allclose(*expected.values(), atol=1e-4)
