"""Models of sound and sight, and recurrent ones: the bits of an ordinary loop, or a true reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.export.conditions import CPU, only_torch_draws
from atomtrain.errors import AnalysisError, ConfigError
from tests.golden.models.test_any_model import adamw, check
from tests.support.any_models import _GROUPED, VOCABULARY, Case, _language_model
from tests.support.engine_models import swap
from tests.support.hugging_face_models import MIXTURES
from tests.support.reference import assert_equal_training, train, twin

pytestmark = pytest.mark.usefixtures("assumed_times", "fastest_plans")
ROWS, LABELS, SIDE = 2, 5, 32
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
}  # fmt: skip


def _pixels() -> Tensor:
    return torch.randn(ROWS, 3, SIDE, SIDE)


def _pictures(model: nn.Module, labels: Callable[[], Any]) -> Case:
    return Case(model.train(), lambda: {"pixel_values": _pixels(), "labels": labels()})


def _classes() -> Tensor:
    return torch.randint(LABELS, (ROWS,))


def segformer() -> Case:
    """Leaves out whole branches of a row at random."""
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=(1, 1), sr_ratios=(2, 1), hidden_sizes=(16, 32),
        patch_sizes=(7, 3), strides=(4, 2), num_attention_heads=(1, 2), mlp_ratios=(2, 2),
        decoder_hidden_size=16, num_labels=LABELS,
    )  # fmt: skip
    model = hf.SegformerForSemanticSegmentation(config)
    return _pictures(model, lambda: torch.randint(LABELS, (ROWS, SIDE, SIDE)))


def convnext() -> Case:
    config = hf.ConvNextConfig(
        num_stages=2, hidden_sizes=(16, 32), depths=(2, 2), num_labels=LABELS, drop_path_rate=0.2
    )
    return _pictures(hf.ConvNextForImageClassification(config), _classes)


def swin() -> Case:
    """Moves its windows in every second block, and leaves out branches as Segformer does."""
    config = hf.SwinConfig(
        image_size=SIDE, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4,
        num_labels=LABELS,
    )  # fmt: skip
    assert config.drop_path_rate > 0
    return _pictures(hf.SwinForImageClassification(config), _classes)


def _yolos() -> Any:
    config = hf.YolosConfig(
        **_SIZES, image_size=(SIDE, SIDE), patch_size=8, num_detection_tokens=4, num_labels=LABELS
    )
    return hf.YolosForObjectDetection(config).train()


def _wav2vec2(**more: Any) -> Any:
    return hf.Wav2Vec2Config(
        **_SIZES, vocab_size=12, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, classifier_proj_size=16,
        mask_time_length=4, **more,
    )  # fmt: skip


_STEADY = {"layerdrop": 0.0, "apply_spec_augment": False}


def _sound(model: nn.Module, labels: Callable[[], Tensor]) -> Case:
    return Case(model.train(), lambda: {"input_values": torch.randn(ROWS, 400), "labels": labels()})


def wav2vec2_classes() -> Case:
    model = hf.Wav2Vec2ForSequenceClassification(_wav2vec2(**_STEADY))
    return _sound(model, lambda: torch.randint(2, (ROWS,)))


def rwkv() -> Case:
    config = hf.RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32,
        intermediate_size=48, rescale_every=0, use_cache=False,
    )  # fmt: skip
    return _language_model(hf.RwkvForCausalLM(config))


def gemma3n() -> Case:
    """Its forward holds parameters within limits, here those that they leave."""
    config = hf.Gemma3nTextConfig(
        **{**_GROUPED, "num_hidden_layers": 4}, head_dim=8, vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8, altup_num_inputs=2, num_kv_shared_layers=2, laurel_rank=8,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=6,
        activation_sparsity_pattern=[0.95, 0.0] * 2, altup_coef_clip=0.03,
    )  # fmt: skip
    return _language_model(hf.Gemma3nForCausalLM(config))


@pytest.mark.parametrize(
    "make",
    [segformer, convnext, swin, wav2vec2_classes, rwkv, gemma3n],
    ids=lambda make: make.__name__,
)
def test_swapped_is_resident(make: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    check(make(), micro_batches=1, segments=3)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_losses_of_routers_count(kind: str, micro_batches: int) -> None:
    torch.manual_seed(0)
    asked = hf.AutoConfig.for_model(
        **MIXTURES[kind], output_router_logits=True, router_aux_loss_coef=0.5
    )
    model = hf.AutoModelForCausalLM.from_config(asked)
    batch = {"input_ids": torch.arange(12).view(1, -1)}
    with torch.no_grad():
        found = model(**batch, labels=batch["input_ids"])
        plain = model(**batch, labels=batch["input_ids"], output_router_logits=False)
    assert float(found.loss) == pytest.approx(float(plain.loss + 0.5 * found.aux_loss), abs=1e-5)
    assert float(found.aux_loss) > 0
    check(_language_model(model), micro_batches, segments=3)


def _in_batch(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Tell which of all answers belongs to each question, by the cosine of their embeddings."""
    mask = batch["attention_mask"][..., None]
    means = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
    asked, answers = nn.functional.normalize(means, dim=-1).unflatten(0, (-1, 2)).unbind(1)
    return nn.functional.cross_entropy(20 * asked @ answers.T, torch.arange(len(asked)))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_embeddings_learn_from_the_other_rows_of_a_batch(micro_batches: int) -> None:
    torch.manual_seed(0)
    model = hf.LlamaModel(hf.LlamaConfig(**_GROUPED)).train()

    def draw() -> dict[str, Tensor]:
        lengths = torch.randint(4, 13, (6, 1))
        ids = torch.randint(VOCABULARY, (6, 12))
        return {"input_ids": ids, "attention_mask": (torch.arange(12) < lengths).long()}

    check(
        Case(model, draw), micro_batches, segments=3,
        loss_of=lambda own, batch: _in_batch(own(**batch), batch), loss=_in_batch,
    )  # fmt: skip


def test_masks_that_are_drawn_in_evaluation_too() -> None:
    """ViT-MAE: the same random state gives the same masks, in steps and in evaluation."""
    config = hf.ViTMAEConfig(
        **_SIZES, image_size=SIDE, patch_size=8, decoder_num_attention_heads=2,
        decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_intermediate_size=48,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.ViTMAEForPreTraining(config).train()
    reference = twin(model)
    resident = adamw(reference.parameters())
    steps = [[{"pixel_values": _pixels()}] for _ in range(2)]
    with swap(model, steps[0][0], optimizer=adamw, segments=3, micro_batches=1) as engine:
        torch.manual_seed(1)
        expected = train(reference, steps, resident, lambda own, batch: own(**batch).loss)
        torch.manual_seed(1)
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, resident)
        reference.eval()
        torch.manual_seed(2)
        with torch.no_grad():
            judged = float(reference(**steps[0][0]).loss)
            other = float(reference(**steps[0][0]).loss)
        torch.manual_seed(2)
        assert engine.evaluate(steps[0]) == judged != other


def _objects(count: Callable[[], int] = lambda: 2) -> Case:
    """Detects boxes, which its loss matches with those that are there by SciPy."""

    def labels() -> Any:
        counts = [count() for _ in range(ROWS)]
        return [
            {"class_labels": torch.randint(LABELS, (n,)), "boxes": torch.rand(n, 4)} for n in counts
        ]

    return _pictures(_yolos(), labels)


def _speech(**more: Any) -> Case:
    """Looks whether labels are words that it knows, and counts those that are none (-100)."""
    model = hf.Wav2Vec2ForCTC(_wav2vec2(**more))

    def labels() -> Tensor:
        drawn = torch.randint(1, 12, (ROWS, 6))
        drawn[1, 4:] = -100
        return drawn

    return _sound(model, labels)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "make", [_objects, lambda: _speech(**_STEADY)], ids=["yolos", "wav2vec2 ctc"]
)
def test_heads_whose_loss_data_decide_run_by_their_own_code(
    make: Callable[[], Case], micro_batches: int
) -> None:
    torch.manual_seed(0)
    engine = check(make(), micro_batches, segments=3)
    names = [layer.name for layer in engine.traced.chain.layers]
    assert any(name.endswith("layer.1") or name.endswith("layers.1") for name in names)


def test_labels_of_such_heads_may_be_smaller_than_the_examples() -> None:
    counts = iter([3, 3, 1, 2, 4, 1])
    model, draw = _objects(lambda: next(counts))
    example, smaller, larger = draw(), draw(), draw()
    reference = twin(model)
    resident = adamw(reference.parameters())
    with swap(model, example, optimizer=adamw, segments=3, micro_batches=1) as engine:
        steps = [[example], [smaller]]
        expected = train(reference, steps, resident, lambda own, batch: own(**batch).loss)
        assert [engine.step(step) for step in steps] == expected
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes
        with pytest.raises(ConfigError, match=r"labels\.\d is int64 \[4\], .* with int64 \[3\]"):
            engine.step([larger])


def _boxes_loss(output: Any, batch: dict[str, Any]) -> Tensor:
    """Match what was detected with what is there by the data."""
    pairs = zip(batch["classes"], batch["boxes"], strict=True)
    labels = [{"class_labels": classes, "boxes": boxes} for classes, boxes in pairs]
    loss: Any = ForObjectDetectionLoss
    result: Tensor = loss(
        output.logits, labels, CPU, output.pred_boxes, hf.YolosConfig(num_labels=LABELS)
    )[0]
    return result


def _boxes() -> Case:
    def draw() -> dict[str, Any]:
        classes, boxes = torch.randint(LABELS, (ROWS, 2)), torch.rand(ROWS, 2, 4) / 2
        return {"pixel_values": _pixels(), "classes": classes, "boxes": boxes}

    return Case(_yolos(), draw)


def _spoken_loss(output: Any, batch: dict[str, Any]) -> Tensor:
    probabilities = output.logits.log_softmax(-1, dtype=torch.float32).transpose(0, 1)
    frames, letters = [len(probabilities)] * ROWS, [batch["spoken"].shape[1]] * ROWS
    return nn.functional.ctc_loss(probabilities, batch["spoken"], frames, letters)


def _spoken() -> Case:
    def draw() -> dict[str, Tensor]:
        sounds = torch.randn(ROWS, 400)
        return {"input_values": sounds, "spoken": torch.randint(1, 12, (ROWS, 6))}

    return Case(hf.Wav2Vec2ForCTC(_wav2vec2(**_STEADY)).train(), draw)


@pytest.mark.parametrize(
    ("make", "loss"), [(_boxes, _boxes_loss), (_spoken, _spoken_loss)], ids=["boxes", "ctc"]
)
def test_a_loss_of_the_callers_may_depend_on_data(make: Callable[[], Case], loss: Any) -> None:
    def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        result: Tensor = loss(model(next(iter(batch.values()))), batch)
        return result

    torch.manual_seed(0)
    check(make(), micro_batches=2, segments=3, loss_of=loss_of, loss=loss)


def test_a_loss_that_data_decide_needs_data() -> None:
    model, draw = _boxes()
    batch = {name: tensor.to("meta") for name, tensor in draw().items()}
    traced = chain_of(model, batch, _boxes_loss)
    with pytest.raises(AnalysisError, match=r"what it does depends on data .* without data"):
        layer_costs(traced.chain, traced.bind(batch))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_speech, r"labels\.max\(\).* depends on data.*inner model .*skip_the_layer"),
        (
            lambda: _sound(
                hf.Wav2Vec2ForSequenceClassification(_wav2vec2(apply_spec_augment=False)),
                lambda: torch.randint(2, (ROWS,)),
            ),
            r"if not skip_the_layer or synced_gpus:\): what runs depends on data",
        ),
    ],
    ids=["ctc with random masks", "random layers"],
)
def test_what_cannot_be_traced_is_refused_with_its_line(
    make: Callable[[], Case], reason: str
) -> None:
    model, draw = make()
    with pytest.raises(AnalysisError, match=reason):
        chain_of(model, draw())


@pytest.mark.parametrize("ran_before", [False, True])
def test_masks_that_numpy_draws_are_refused(ran_before: bool) -> None:
    """They would be those of the trace in every step; a model that ran is not prepared any more."""
    model = hf.Wav2Vec2ForSequenceClassification(_wav2vec2(layerdrop=0.0)).train()
    batch = {"input_values": torch.randn(ROWS, 400), "labels": torch.randint(2, (ROWS,))}
    if ran_before:
        model(**batch)
    state = np.random.get_state()[2]
    with pytest.raises(AnalysisError, match=r"numbers of NumPy, .* apply_spec_augment"):
        chain_of(model, batch)
    assert np.random.get_state()[2] == state


class _Noisy(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inner, self.draw = nn.Linear(3, 3), draw

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(rows).sum() * self.draw()}


def _of_another_thread() -> float:
    with ThreadPoolExecutor() as pool:
        return pool.submit(random.random).result()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.uniform(1, 2),
        lambda: random.choice([1.0, 2.0]),
        lambda: random.gauss(1, 2),
        random.random,
    ],
    ids=["uniform", "choice", "gauss", "imported by name"],
)
def test_random_numbers_of_python_are_refused(draw: Callable[[], float]) -> None:
    random.gauss(1, 2)  # leaves a second number for the next call
    state = random.getstate()
    with pytest.raises(AnalysisError, match="draws random numbers of Python, which would be"):
        chain_of(_Noisy(draw), {"rows": torch.randn(2, 3)})
    assert random.getstate() == state


def test_others_may_draw_meanwhile() -> None:
    """A peer's network draws whom it asks, on a thread of its own."""
    random.seed(1)
    expected = [random.random() for _ in range(2)]
    random.seed(1)
    told = SimpleQueue[float]()  # a list that forward changes would be refused

    def draw() -> float:
        told.put(_of_another_thread())
        return 1.0

    chain_of(_Noisy(draw), {"rows": torch.randn(2, 3)})
    drawn = [told.get() for _ in range(told.qsize())]
    assert drawn[:2] == expected[: len(drawn)]
    assert drawn


def test_models_may_be_traced_in_several_threads() -> None:
    usual, noted = random.random, SimpleQueue[bool]()

    def draw() -> float:
        noted.put(random.random is not usual)
        return 1.0

    with ThreadPoolExecutor(4) as pool:
        batch = {"rows": torch.randn(2, 3)}
        for made in [pool.submit(chain_of, _Noisy(draw), batch) for _ in range(8)]:
            made.result()
    assert noted.qsize() >= 8
    assert all(noted.get() for _ in range(noted.qsize()))
    with only_torch_draws(), only_torch_draws():
        assert random.random is not usual
    assert random.random is usual
