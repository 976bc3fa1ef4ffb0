"""What a model is tried for before a run, rather than trusted.

*Its layers* are compared with the model itself, where that takes little.

*Packed documents* must not see each other. A model may take `position_ids` and still carry
something from one document to the next: a state, a convolution, an attention mask that does not
look at them. So two sequences with different first documents and the same second one go through a
random model of the same kind, packed as in training. What the model says of the second document
must be the same. Nothing else is passed that keeps a state apart (`seq_idx`, `cu_seq_lens_q`):
models hand it on to kernels that are not PyTorch's, and in a graph that `torch.export` writes down
these are never used.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.checking import check_chain
from atomtrain.analysis.layers.trace import MicroBatch, chain_of
from atomtrain.data.sampler import Batch
from atomtrain.engine.engine import Engine
from atomtrain.errors import ConfigError
from atomtrain.models.hugging_face import HuggingFaceConfig
from atomtrain.models.making import narrow_models, parameter_count
from atomtrain.progress import Progress
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.objective import NextToken, Objective
from atomtrain.units import format_bytes

MOST_BYTES = 1 << 30
"""Of parameters, up to which a model is compared without being asked: the check takes twice as much
for gradients."""
MOST_S = 20.0
"""Seconds of the check, as estimated, up to which a model is compared without being asked."""
_RUNS = 2
_FLOPS_A_THREAD = 20e9
"""What a thread of a processor computes in a second, roughly and rather too little."""
_log = logging.getLogger("atomtrain.training")


def check_model(
    engine: Engine, recipe: Recipe, options: TrainOptions, objective: Objective, example: MicroBatch
) -> None:
    """Compare the layers' loss and gradients with the model's own, if that is wanted.

    Raises:
        AnalysisError: they differ.
    """
    if options.check_model == "never" or not isinstance(recipe.sizes, HuggingFaceConfig):
        return
    if options.check_model == "auto" and (reason := _too_much(engine)):
        _log.info("the model is not compared with its layers: %s", reason)
        return
    with Progress("comparing the layers with the model, on one micro-batch"):
        engine.synchronize()
        traced = engine.traced
        if engine.device.torch_device.type != "cpu":
            traced = chain_of(engine.model, example, objective.loss)
        check_chain(engine.model, traced, example)


def _too_much(engine: Engine) -> str:
    """Return why a model is not compared unless that is asked for, `""` if it is."""
    if "parameters" in engine.plan.on_disk:
        return "parameters are on disk"
    n_bytes = sum(parameter.nbytes for parameter in engine.model.parameters())
    if n_bytes > MOST_BYTES:
        return f"it has {format_bytes(n_bytes)} of parameters, more than {format_bytes(MOST_BYTES)}"
    layers = engine.planner.costs.layers
    flops = sum(layer.forward_flops + layer.backward_flops for layer in layers)
    seconds = _RUNS * flops / (_FLOPS_A_THREAD * torch.get_num_threads())
    return f"it would take {seconds:.0f} s, more than {MOST_S:.0f} s" if seconds > MOST_S else ""


_DOCUMENT_TOKENS = 13
"""Odd, so that documents do not begin where models divide a sequence into chunks."""
_ROUNDING = 1e-5
"""Share of the largest logit. Float32 has rounded by up to 1e-6 of it in mixtures of experts, where
a product's other rows decide how it adds; what was seen of another document was 5e-4 and more."""


def check_separation(name: str, sizes: HuggingFaceConfig, outline: nn.Module) -> None:
    """Refuse a model that does not keep the documents of a sequence apart.

    Raises:
        ConfigError: it does not, or it cannot be tried; says what was found.
    """
    if "position_ids" not in inspect.signature(outline.forward).parameters:
        raise _refusal(name, "takes no position_ids, so packed documents would see each other")
    reason = "it is too large, and a narrower one cannot be built"
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        for model in narrow_models(sizes, parameter_count(outline)):
            try:
                found = _tried(model)
            except Exception as error:  # noqa: BLE001 (a class of transformers may raise anything)
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                continue
            if found.seen > _ROUNDING:
                raise _refusal(
                    name,
                    "does not keep documents that share a sequence apart (another first one "
                    f"changes the second one's logits by {found.seen:.2g} of the largest)",
                )
            if found.mixed > _ROUNDING:
                return
            reason = "a narrow model of its kind does not react to other tokens"
    raise _refusal(name, f"cannot be tried for documents that share a sequence ({reason})")


class _Found(NamedTuple):
    """How far the second document depends on the first, as a share of the largest logit."""

    seen: float
    """Packed as in training."""
    mixed: float
    """As one text: what there is to see."""


def _tried(model: Any) -> _Found:
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            parameter.normal_(std=0.02)  # what begins at zero would hide what passes through it
    vocabulary = model.get_input_embeddings().weight.shape[0]
    first, other, second = torch.randint(1, vocabulary, (3, 1, _DOCUMENT_TOKENS)).unbind()
    documents = torch.arange(2).repeat_interleave(_DOCUMENT_TOKENS)[None]

    def changed(documents: Tensor | None) -> float:
        said = [_said_of_last(model, (before, second), documents) for before in (first, other)]
        if not all(each.isfinite().all() for each in said):
            raise ValueError("its logits are not finite")
        return float((said[0] - said[1]).abs().max() / said[0].abs().max())

    return _Found(changed(documents), changed(None))


def _said_of_last(
    model: nn.Module, texts: tuple[Tensor, Tensor], documents: Tensor | None
) -> Tensor:
    ids = torch.cat(texts, 1)
    inputs = NextToken().inputs(Batch(ids, ids, documents=documents))
    logits: Tensor = model(**inputs).logits
    return logits[:, -_DOCUMENT_TOKENS:]


def _refusal(name: str, found: str) -> ConfigError:
    return ConfigError(f"{name} {found}; train it without --packing")
