"""Models that `peft` has wrapped, with a loop or a `Trainer` of one's own: the bits of an ordinary
loop, and folders that `peft` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import atomtrain
from tests.golden.models.test_any_model import check
from tests.support.any_models import _language_model
from tests.support.hugging_face_models import UNTIED, VOCABULARY

hf = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("assumed_times", "fastest_plans")


def base() -> Any:
    torch.manual_seed(1)
    return hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**UNTIED))


def config(**more: Any) -> Any:
    asked = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False, **more}
    return peft.LoraConfig(task_type="CAUSAL_LM", **asked)


def adapted(**more: Any) -> Any:
    torch.manual_seed(2)
    return peft.get_peft_model(base(), config(**more))


def with_another() -> Any:
    """Two adapters of unlike size, of which the second one is trained."""
    model = adapted()
    model.add_adapter("another", config(r=2, target_modules=["v_proj"]))
    model.set_adapter("another")
    return model


def saved_as_read(model: Any, folder: Path, adapter: str) -> None:
    """Check that `peft` reads from a folder what one of a model's adapters is."""
    own = peft.PeftModel.from_pretrained(base(), folder, adapter_name=adapter).eval()
    model.set_adapter(adapter)
    ids = torch.arange(2, 40).view(2, -1)
    with torch.no_grad():
        assert torch.equal(own(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "more",
    [{"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens", "q_proj"]}],
    ids=["modules_to_save", "embeddings"],
)
def test_swapped_is_resident(more: dict[str, Any], micro_batches: int) -> None:
    check(_language_model(adapted(**more)), micro_batches, segments=3)


def test_one_of_several_adapters_is_trained() -> None:
    model = with_another()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check(_language_model(model), 1, segments=3)
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {name for name in before if ".another." in name}


@pytest.mark.parametrize("several", [False, True])
def test_trainer_writes_what_peft_reads(tmp_path: Path, several: bool) -> None:
    model = with_another() if several else adapted(modules_to_save=["lm_head"])
    ids = torch.randint(VOCABULARY, (12, 16))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = atomtrain.TrainerArguments(output_dir=tmp_path, micro_batch=4, learning_rate=0.01)
    with atomtrain.Trainer(
        model, arguments, rows, device="emulated", device_memory="1MiB"
    ) as trainer:
        trainer.train()
        folder = trainer.save_model(tmp_path / "adapters")
    saved_as_read(model, folder, "default")
    if several:
        saved_as_read(model, folder / "another", "another")
