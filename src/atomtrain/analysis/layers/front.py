"""What a model does before its language model, by its own code, as one layer (see `front_parts`).

Where a model reads images, data often decide what runs: into how many patches an image is cut, or
how many images there are. That cannot be exported. So this layer runs the model's own forward, as
it is, up to the call of the language model; what that is given are the values that the layer
writes. They have the same shapes in every micro-batch, images may have any. What follows is
exported as with any other model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from atomtrain.analysis.export.conditions import only_torch_draws
from atomtrain.analysis.export.structure import NotPlainError, put_together, taken_apart
from atomtrain.analysis.layers.chain import Aside, Layer
from atomtrain.analysis.layers.known_data import known_data
from atomtrain.analysis.layers.micro_batch import Inputs, MicroBatch, Spec
from atomtrain.errors import AnalysisError, ConfigError, reason_of

NAME = "front"
FREE_SHAPES = "free_shapes"
"""An attribute of models: names of what forward takes in unlike shapes, though it could be exported
with those of the example."""
_FEATURES, _PLACES, _ADD = "deepstack_visual_embeds", "visual_pos_masks", "_deepstack_process"
"""Of models that add features to the hidden states of some layers: as many as there are places."""
_READ_BEFORE = ("input_ids", "pixel_values")
"""What a model takes that its language model does not see, if it takes `inputs_embeds` too."""
_HOOKED = "_output_capturing_hooks_installed"
"""Says of transformers' models that their modules have hooks, which stay: they would come twice."""


class _ReachedError(Exception):
    """Ends a forward where enough of it has run."""


class Found(NamedTuple):
    """What is known of the language model's call once the front has run."""

    skeleton: Any
    """Of its arguments; tensors are those of the micro-batch and then those of `specs`."""
    specs: tuple[Spec, ...]
    """Of the values that the front makes."""
    output: type
    """What the model around the language model returns."""


@dataclass(frozen=True, eq=False)
class _Around:
    """What is around the language model that `base` holds."""

    base: nn.Module
    modules: list[nn.Module]


class OwnCode(nn.Module):
    """Runs a model's own forward up to its language model, on a micro-batch as it is."""

    def __init__(self, model: nn.Module, inputs: Inputs, example: Sequence[Tensor]) -> None:
        """Take a model that holds a language model (`language_of`).

        Args:
            model: Any such.
            inputs: Of the example.
            example: Its tensors, with data.
        """
        super().__init__()
        self._model, self.inputs, self.example = Aside(model), inputs, list(example)
        self._found: Found | None = None
        self._known_around: _Around | None = None

    @property
    def model(self) -> Any:
        """The whole model."""
        return self._model.module

    @property
    def found(self) -> Found:
        """What the language model is given."""
        assert self._found is not None
        return self._found

    @property
    def base(self) -> nn.Module:
        """What is around the language model, without its head."""
        base: nn.Module = self.model.base_model
        return base

    @property
    def language(self) -> Any:
        """The language model."""
        return language_of(self.model)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        with unchanged(self._around()), self._own_weights():
            if not any(isinstance(value, FakeTensor) for value in values):
                return self.made(values)
            with known_data(zip(values, self.example, strict=False)), _same_buffers(self):
                return self.made(values)

    def _around(self) -> list[nn.Module]:
        """Return what may run: looking for it takes as long as some of it."""
        base = self.base
        if self._known_around is None or self._known_around.base is not base:
            within = {id(module) for module in self.language.modules()}
            around = [module for module in base.modules() if id(module) not in within]
            self._known_around = _Around(base, around)
        return self._known_around.modules

    def hold_own(self) -> None:
        """Hold the weights that what is around the language model has beside its modules."""
        for name, own in self.base.named_parameters(recurse=False):
            self.register_parameter(name, own)

    @contextmanager
    def _own_weights(self) -> Iterator[None]:
        """Have such weights be where the model looks for them, as they are now."""
        before = dict(self.base._parameters)
        self.base._parameters.update(self._parameters)
        try:
            yield
        finally:
            self.base._parameters.update(before)

    def made(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors that the language model is given and the micro-batch does not have.

        Args:
            values: Of the micro-batch; others may follow.
        """
        tensors = values[: len(self.example)]
        arguments, output = self.reached(tensors)
        found = list(tensors)
        try:
            skeleton = taken_apart(arguments, found)
        except NotPlainError as error:
            raise AnalysisError(
                f"the language model is given a {error}, not only tensors and plain values; give "
                "use_cache=False, or name the layers with layers=[...]"
            ) from error
        made = tuple(found[len(tensors) :])
        specs = tuple(Spec(tuple(tensor.shape), tensor.dtype) for tensor in made)
        if self._found is None:
            self._found = Found(skeleton, specs, output)
        elif (skeleton, specs) != self._found[:2]:
            raise ConfigError(
                "a micro-batch gives the language model other shapes or values than the example "
                f"({_told(specs)} instead of {_told(self._found.specs)}); pad its tokens, or swap "
                "the model with such an example"
            )
        return made

    def reached(self, tensors: Sequence[Tensor]) -> tuple[Any, type]:
        """Return the arguments of the language model, and the type of what is around it."""
        given: list[Any] = []
        output: list[type] = []
        around = self.base.forward

        def language(*args: Any, **kwargs: Any) -> Any:
            given.append((args, _dense(_without_cache(kwargs))))
            if self._found is not None or self.base is self.model:
                raise _ReachedError
            return _Output(last_hidden_state=kwargs.get("inputs_embeds"))

        def base(*args: Any, **kwargs: Any) -> Any:
            made = around(*args, **kwargs)
            hidden = getattr(made, "last_hidden_state", None)
            if given and (not is_dataclass(made) or hidden is not given[0][1].get("inputs_embeds")):
                raise AnalysisError("what its language model returns is changed before its head")
            output.append(type(made))
            raise _ReachedError

        with (
            instead(self.language, "forward", language),
            instead(self.base, "forward", base),
            suppress(_ReachedError),
        ):
            self.inputs.call(self.model, tensors)
        if not given:
            raise AnalysisError("forward does not call its language model")
        return given[0], output[0] if output else type(None)

    def run_without_data(self) -> None:
        """Run on the example, with weights that have no data.

        Raises:
            AnalysisError: the model does not run, or does not call its language model.
        """
        named = (
            *self.named_parameters(remove_duplicate=False),
            *self.named_buffers(remove_duplicate=False),
        )
        with FakeTensorMode(), torch.no_grad(), only_torch_draws():
            given = [torch.empty(t.shape, dtype=t.dtype) for t in self.example]
            tensors = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in named}
            try:
                Layer(NAME, self, (), ()).call(tensors, given)
            except (AnalysisError, ConfigError):
                raise
            except Exception as error:  # whatever forward raises
                raise AnalysisError(
                    "its own code cannot run without data up to its language model "
                    f"({reason_of(error)})"
                ) from error


class Front(OwnCode):
    """Everything before the language model in one layer."""

    def __init__(self, model: nn.Module, inputs: Inputs, example: MicroBatch) -> None:
        """Take the modules before the language model.

        Args:
            model: One that holds a language model (`language_of`).
            inputs: Of the example.
            example: A micro-batch with data.

        Raises:
            AnalysisError: the model does not run, or does not call its language model.
        """
        tensors = [tensor.detach().cpu() for tensor in inputs.tensors(example)]
        super().__init__(model, inputs, tensors)
        for name, child in self.base.named_children():
            if child is not self.language:
                self.add_module(name, child)
        self.hold_own()
        self.input_embeddings = self.model.get_input_embeddings()
        self._modes = {name: module.training for name, module in self.named_modules()}
        self.run_without_data()
        made = [f"{NAME}/{index}" for index in range(len(self.found.specs))]
        self.layer: Layer = Layer(NAME, self, tuple(inputs.tensor_names), tuple(made))

    def check_modes(self) -> None:
        """Refuse modules in another mode than when they were measured: dropout would draw, running
        statistics would change, and nobody counts on it.

        Raises:
            ConfigError: one is; names it.
        """
        for name, module in self.named_modules():
            if name and module.training != self._modes[name]:
                was = self._modes[name]
                raise ConfigError(
                    f"{name} was swapped with training={was} and has training={module.training} "
                    f"now; call its train({was}), or swap the model again"
                )


class Rest:
    """The model from its language model on: what export takes in place of the micro-batch."""

    def __init__(self, front: Front, inputs: Inputs, example: MicroBatch) -> None:
        self._front, self._inputs, self._found = front, inputs, front.found
        self._given = inputs.tensors(example)
        self.tensor_names = [*inputs.tensor_names, *front.layer.writes]

    def tensors(self, example: MicroBatch) -> list[Tensor]:
        """Return the tensors of the micro-batch, and those of the front, without data."""
        made = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in self._found.specs]
        return [*self._inputs.tensors(example), *made]

    def call(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Call the model with a front that has run."""
        args, kwargs = put_together(self._found.skeleton, tensors)
        front = self._front
        around, whole = front.base.forward, front.base is front.model
        language = front.language.forward

        def base(*given: Any, **named: Any) -> Any:
            if whole:  # what follows its language model is its own code too
                named |= zip(inspect.signature(around).parameters, given, strict=False)
                named |= dict.fromkeys(_READ_BEFORE)
                return around(**named, inputs_embeds=kwargs.get("inputs_embeds"))
            output = language_of(model)()
            names = {field.name for field in fields(self._found.output)}
            return self._found.output(**{k: v for k, v in output.items() if k in names})

        def made(*_: Any, **__: Any) -> Any:
            return language(*args, **kwargs)

        with (
            instead(front.base, "forward", base),
            instead(front.language, "forward", made),
            instead(front.language, _ADD, _add_dense),
        ):
            return self._inputs.call(model, tensors[: len(self._given)])


def has_front(model: nn.Module, example: Sequence[Tensor]) -> bool:
    """Return whether a model holds a language model beside other parts, and there are data."""
    if any(tensor.is_meta for tensor in example):
        return False
    language, base = language_of(model), getattr(model, "base_model", None)
    if language is None or base is None or language is base or language is model:
        return False
    return any(child is language for child in base.children())


def language_of(model: nn.Module) -> Any:
    """Return the language model that a model holds, perhaps itself; `None`: it does not say.

    Of a model whose parts include one with a head (Llama 4), that part.
    """
    find = getattr(model, "get_decoder", None)
    found = None if find is None else find()
    if found is not None and getattr(model, "base_model", None) is model:
        holders = (child for child in model.children() if found in set(child.modules()))
        return next(holders, found)
    return found


class _Output(dict[str, Any]):
    """What a language model returns, for who only hands it on: its entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without caches that are empty: a language model makes such by itself."""
    return {
        name: None if hasattr(value, "get_seq_length") and not value.get_seq_length() else value
        for name, value in kwargs.items()
    }


def _dense(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with features in their places among zeros, `[B, T, D]` each."""
    features, places = kwargs.get(_FEATURES), kwargs.get(_PLACES)
    if features is None or places is None:
        return kwargs
    dense = []
    for each in features:
        zeros = each.new_zeros(*places.shape, each.shape[-1])
        dense.append(zeros.masked_scatter(places.unsqueeze(-1), each))
    return {**kwargs, _FEATURES: dense}


def _add_dense(hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Add features in their places, to the same bits as where they are picked out."""
    return torch.where(places.unsqueeze(-1), hidden + features.to(hidden.dtype), hidden)


@contextmanager
def instead(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Have a function in the place of a method."""
    own = vars(module)
    before = own.get(name)
    own[name] = function
    try:
        yield
    finally:
        if before is None:
            del own[name]
        else:
            own[name] = before


@contextmanager
def elsewhere(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Have the weights of modules be on a device, without data: code asks for place and type."""
    before = [
        (module._parameters, name, own)
        for module in modules
        for name, own in module._parameters.items()
        if own is not None
    ]
    zeros = {
        dtype: torch.zeros((), dtype=dtype, device=device)
        for dtype in {own.dtype for _, _, own in before}
    }
    holders: Any
    try:
        for holders, name, own in before:
            holders[name] = zeros[own.dtype].expand(own.shape)
        yield
    finally:
        for holders, name, own in before:
            holders[name] = own


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Refuse forward to put another tensor in the place of a buffer: it would be lost."""
    before = [dict(module._buffers) for module in model.modules()]
    yield
    for module, known in zip(model.modules(), before, strict=True):
        for name, buffer in module._buffers.items():
            if buffer is not known[name]:
                raise AnalysisError(
                    f"forward replaces the buffer {name!r} of {type(module).__name__}; change it "
                    "in place, such as with copy_"
                )


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules the attributes back that they have now.

    Those set meanwhile may have no data, or be of a micro-batch and mislead who generates next.
    """
    before = [(vars(module), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for own, known in before:
            for name in [name for name in own if name not in known and name != _HOOKED]:
                del own[name]
            own.update(known)


def _told(specs: Sequence[Spec]) -> str:
    return ", ".join(str(list(spec.shape)) for spec in specs)
