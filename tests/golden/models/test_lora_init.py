"""Adapters that begin with a part of their matrix: as peft begins them, and exported as it does."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from atomtrain.cli.main import main
from atomtrain.engine.api import swap
from atomtrain.engine.engine import Engine
from atomtrain.errors import ConfigError, DataError
from atomtrain.models.hugging_face import build, read_config
from atomtrain.models.lora import LoraLinear, adapted_layers, add_adapters
from atomtrain.models.lora_config import LoraConfig, parse_lora
from atomtrain.models.lora_init import begin
from atomtrain.optimizers import AdamW
from atomtrain.progress import Progress
from atomtrain.training.setup.loading import Weights
from atomtrain.training.setup.objective import NextToken
from atomtrain.training.setup.references import _key
from tests.support.hugging_face_models import (
    MIXTURES,
    UNTIED,
    saved_tensors,
    train_by_command,
    write_model,
    write_text,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")
train = partial(train_by_command, memory="2MiB", sequences=4, steps=3)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def matrix(rows: int, columns: int) -> Tensor:
    """Return a matrix whose singular values fall, as trained ones do."""
    generator = torch.Generator().manual_seed(rows)
    side = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, side, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(columns, side, generator=generator))[0]
    return left @ torch.diag(0.6 ** torch.arange(side)) @ right.mT


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora"])
def test_adapters_begin_as_those_of_peft(init: str, shape: tuple[int, int], rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    weight = matrix(*shape)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    model[0].weight.data = weight.clone()
    asked = peft.LoraConfig(
        r=5, lora_alpha=8, target_modules=["0"], init_lora_weights=init, use_rslora=rslora
    )
    torch.manual_seed(0)
    theirs = peft.get_peft_model(model, asked).base_model.model[0]
    config = LoraConfig(r=5, alpha=8.0, init=init, rslora=rslora)
    found = begin(weight, config, "seed")
    torch.testing.assert_close(
        found.within(weight, -config.scale), theirs.base_layer.weight.data, atol=2e-6, rtol=1e-5
    )
    a, b = theirs.lora_A["default"].weight.data, theirs.lora_B["default"].weight.data
    # A singular vector and its opposite are one and the same.
    signs = (found.a * a).sum(1).sign()
    assert init != "olora" or (signs == 1).all()
    torch.testing.assert_close(found.a * signs[:, None], a, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(found.b * signs, b, atol=5e-5, rtol=1e-4)


def loaded(folder: Path, config: LoraConfig) -> Engine:
    """Return an engine with the folder's weights and adapters that have not learnt."""
    sizes = read_config(folder)
    model = add_adapters(build(sizes), config)
    ids = torch.arange(24).view(2, 12)
    return swap(
        model,
        {"input_ids": ids, "targets": ids, "mean_targets": torch.tensor(24.0)},
        optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        device="emulated",
        device_memory="2MiB",
        loss=NextToken().loss,
    )


@pytest.mark.usefixtures("assumed_times")
@pytest.mark.parametrize("more", ["", ",dora=true", ",bits=8"])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_model_says_the_same_at_first_and_its_matrices_are_read_one_by_one(
    init: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_model(tmp_path, UNTIED)
    held: list[int] = []

    def watched(weight: Tensor, *rest: Any) -> Any:
        held.append(weight.numel())
        return begin(weight, *rest)

    monkeypatch.setattr("atomtrain.models.lora.begin", watched)
    config = parse_lora(f"r=4,alpha=6,init={init}{more}")
    with loaded(tmp_path, config) as engine:
        Weights(tmp_path, read_config(tmp_path), seed=3).load(engine)
        layers = adapted_layers(engine.model)
        assert held == [layer.base().numel() for layer in layers.values()]
        ids = torch.arange(24).view(2, 12)
        with torch.no_grad():
            found = engine.model.eval()(ids).logits
            expected = plain(ids).logits
        atol = 2e-2 if "bits" in more else 1e-5
        torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)
        stored = load_file(tmp_path / "model.safetensors")
        for name, layer in layers.items():
            assert isinstance(layer, LoraLinear)
            assert layer.lora_B.weight.abs().sum() > 0
            taken_out = (stored[f"{name}.weight"] - layer.base()).norm()
            assert taken_out > 0.1 * stored[f"{name}.weight"].norm(), name


def trained(folder: Path, run: Path, lora: str) -> Any:
    """Return the model as it was trained: the frozen matrices without what was taken out."""
    sizes = read_config(folder)
    weights, model = Weights(folder, sizes), build(sizes)
    weights.fill(model)
    add_adapters(model, parse_lora(lora))
    saved = saved_tensors(run)
    with torch.no_grad():
        for name, layer in adapted_layers(model).items():
            read = partial(weights._wide, name)
            for part, values in layer.beginning(read, f"0/{name}"):
                key = f"{name}.{part}/parameter"
                layer.get_parameter(part).copy_(saved.get(key, values))
    return model.eval()


@pytest.mark.parametrize(
    "lora",
    [
        "r=4,alpha=6,init=pissa",
        "r=4,alpha=6,init=pissa_niter_2,rslora=true",
        "r=4,init=olora,dora=true,targets=q_proj+up_proj",
    ],
)
def test_the_export_is_adapters_of_the_published_model(lora: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    write_model(folder, UNTIED)
    run = train(folder, text, "adapted", "--lora", lora)
    assert main(["export", str(run), "adapters"]) == 0
    assert main(["export", str(run), "merged", "--merge"]) == 0
    said = json.loads(Path("adapters/adapter_config.json").read_text())
    assert said["r"] == 8
    assert "init_lora_weights" not in said
    ids = torch.arange(12)[None]
    load: Any = AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        expected = trained(folder, run, lora)(ids).logits
        with_adapters = peft.PeftModel.from_pretrained(load(folder), "adapters").eval()
        torch.testing.assert_close(with_adapters(ids).logits, expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(load("merged")(ids).logits, expected, atol=2e-5, rtol=1e-4)
        assert not torch.allclose(load(folder)(ids).logits, expected, atol=1e-3)
    assert main(["evaluate", "adapters", "--data", str(text), "--context", "16"]) == 0


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_a_run_resumes_with_the_same_bits(init: str, tmp_path: Path) -> None:
    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    write_model(folder, UNTIED)
    run = train(folder, text, "mine", "--lora", f"r=4,init={init}", "--checkpoint-every", "1")
    expected = saved_tensors(run)
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    train(folder, text, "mine", "--resume")
    found = saved_tensors(run)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def test_equal_singular_values_are_refused_unless_all_or_none_are_taken() -> None:
    config = LoraConfig(r=4, init="pissa")
    with pytest.raises(ConfigError, match=r"largest singular values .* give another r"):
        begin(torch.eye(8), config, "")
    assert (
        begin(torch.eye(4), config, "")
        .within(torch.zeros(4, 4), config.scale)
        .allclose(torch.eye(4), atol=1e-6)
    )
    thin = matrix(8, 4)[:, :2] @ matrix(4, 8)[:2]  # of rank 2: nothing is left to choose from
    taken = begin(thin, config, "").within(torch.zeros(8, 8), config.scale)
    torch.testing.assert_close(taken, thin, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_a_matrix_that_is_not_of_numbers_is_refused(init: str) -> None:
    weight = matrix(8, 8)
    weight[3, 4] = torch.nan
    with pytest.raises(DataError, match=rf"of \[8, 8\] has values .* init={init} finds no main"):
        begin(weight, LoraConfig(r=2, init=init), "")


def test_what_a_model_is_compared_with_is_of_one_beginning() -> None:
    def key(lora: str, seed: int = 0) -> str:
        recipe: Any = SimpleNamespace(
            context=8, model="m", precision="fp32", seed=seed, lora=parse_lora(lora)
        )
        return _key(cast(Any, SimpleNamespace(sha256="rows")), recipe)

    assert key("r=2", 1) == key("r=4")
    keys = [key(f"r={r},bits=4,init={init}") for r in (2, 4) for init in ("olora", "pissa")]
    keys += [key("r=2,bits=4,init=pissa", 1), key("r=2,bits=4")]
    assert len(set(keys)) == len(keys)


@pytest.mark.usefixtures("assumed_times")
def test_what_takes_long_is_told_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Told(Progress):
        def __exit__(self, *rest: Any) -> None:
            told.append(self.line(4.0).partition(" (")[0])
            super().__exit__(*rest)

    for module in ("loading", "adapters"):
        monkeypatch.setattr(f"atomtrain.training.setup.{module}.Progress", Told)
    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    write_model(folder, UNTIED)
    run = train(folder, text, "adapted", "--lora", "r=4,init=pissa,targets=q_proj+up_proj")
    assert "beginning adapters: 6 of 6 layers" in told
    assert main(["export", str(run), "adapters"]) == 0
    assert told[-1] == "finding how adapters began: 6 of 6 layers"


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ("init=svd", "must be pissa, pissa_niter_16"), ("init=pissa_niter_0", "must be pissa"),
        ("init=olora,r=40", "give r=32 or less"),
        ("init=pissa,targets=experts", "begin at nothing"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    lora: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "m", MIXTURES["mixtral"] if "experts" in lora else UNTIED)
    text = write_text(tmp_path / "text.txt")
    capsys.readouterr()
    assert main([
        "train", "--model", str(tmp_path / "m"), "--data", str(text), "--plain", "--lora", lora,
        "--device", "emulated",
    ]) == 2  # fmt: skip
    told = capsys.readouterr().err
    assert expected in told
    assert told.count("\n") == 1
