"""Runs a model once without data and writes down its operations: a flat graph with named tensors.

The graph is `torch.export`'s, before autograd decomposes anything, so that running it does the same
operations as the model, backward included, bit for bit.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind

from atomtrain.analysis.export.attributes import (
    attributes_of,
    changes_in,
    check_side_effects,
    held_tensors,
    left_by,
    restored_if_failed,
)
from atomtrain.analysis.export.conditions import (
    CPU,
    MANUAL,
    DataAndPlaces,
    Way,
    check_dtypes,
    hidden,
    only_torch_draws,
    quiet,
    seeming_on,
    ways_to_trace,
    without_collector,
    without_hooks,
)
from atomtrain.analysis.export.equal_modules import equal_modules
from atomtrain.analysis.export.flattening import Flattener
from atomtrain.analysis.export.functions import Functions
from atomtrain.analysis.export.outside import Outside
from atomtrain.analysis.export.plain_trace import INNER, plain_trace
from atomtrain.analysis.export.stand_ins import StandIns, repeat, why_unequal
from atomtrain.analysis.export.structure import take_apart
from atomtrain.errors import AnalysisError, AtomError, ConfigError, reason_of

_log = logging.getLogger("atomtrain.analysis")
_LIFTED = "fake tensor in the exported program constant's list"
"""What torch says where a model takes the `.data` of a tensor."""
_OBJECT = (
    "forward uses an object that cannot be traced, such as a torch.Generator of its own; draw "
    f"random numbers from torch's, {MANUAL}"
)


@dataclass(frozen=True)
class Exported:
    """A model's operations in the order of execution, and what they work on."""

    graph: fx.Graph
    """Placeholders, calls without nested graphs, and one output: a tuple of tensors."""
    parameters: Mapping[fx.Node, nn.Parameter]
    buffers: Mapping[fx.Node, tuple[str, Tensor]]
    """The model's buffers with their names in the model."""
    literals: Mapping[fx.Node, Tensor]
    """Tensors that the code of forward contains."""
    inputs: Mapping[fx.Node, int]
    """Placeholders of the micro-batch's tensors, with their positions."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes what the model returns from the graph's output."""
    device: torch.device
    """Where the model's tensors seemed to be."""


class _Output:
    """Outlives the export, which takes back what forward assigns to attributes of modules."""

    rebuild: Callable[[Sequence[Any]], Any] = tuple
    attributes: Mapping[str, Mapping[str, Any]] = {}
    assigned: Mapping[str, Tensor] = {}
    """Buffers and other tensors of modules, by their paths in the model, in whose places forward
    put others."""


class _Recorded(nn.Module):
    """Calls the model with its tensors in place and returns the tensors that are wanted."""

    def __init__(
        self, model: nn.Module, call: Callable[..., Any], own_loss: bool, as_eager: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.call, self.own_loss, self.as_eager = call, own_loss, as_eager
        self.training = model.training
        self.output = _Output()
        self.known: Mapping[str, Mapping[str, Any]] = {}
        """What `attributes_of` returns where none is hidden, as `StandIns` hide some."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        before, seen = held_tensors(self.model), attributes_of(self.model)
        with hidden() if self.as_eager else nullcontext():
            output = self.call(self.model, tensors)
        self.output.attributes = {
            path: {n: v for n, v in self.known.get(path, {}).items() if n not in seen.get(path, ())}
            | own
            for path, own in attributes_of(self.model).items()
        }
        now = held_tensors(self.model)
        self.output.assigned = {
            name: was for name, was in before.items() if now.get(name) is not was
        }
        if self.own_loss:
            return (loss_in(output),)
        structure = take_apart(output)
        self.output.rebuild = structure.rebuild
        return tuple(structure.tensors)


def loss_in(output: Any) -> Tensor:
    """Return the `.loss` (or the entry `loss`) of what a model returns.

    Raises:
        ConfigError: it has none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        kind = "Tensor" if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(
            f"the model's output ({kind}) has no loss of its own; pass "
            "loss=callable, such as loss=lambda output, batch: cross_entropy(output, batch[1]), "
            "or an example with labels if the model then computes its loss"
        )
    return loss


def export(
    model: nn.Module,
    tensors: Sequence[Tensor],
    call: Callable[..., Any],
    *,
    own_loss: bool,
    grad: bool = True,
    device: torch.device = CPU,
    as_eager: bool = False,
) -> Exported:
    """Return the operations of one call of the model, in the mode that its modules are in.

    Nothing is computed or allocated; random number generators are left as they were.

    Args:
        model: Its weights may be on the meta device.
        tensors: The micro-batch's tensors, of which only shape and type matter.
        call: `call(model, tensors)` calls the model.
        own_loss: Keep only what the loss of the model's own output needs.
        grad: Whether autograd records; some modules take other paths without it.
        device: Where the operations will run: the model sees all of its tensors there.
        as_eager: Not if the model has to know that it is traced, which may change its last bits.

    Raises:
        AnalysisError: forward depends on data, changes Python objects, or uses what cannot be
            trained swapped; names the source line.
        ConfigError: the output has no loss.
    """
    check_dtypes(model)
    # Fresh tensors of the same layout: one tensor given twice would become one input.
    given = tuple(torch.empty_like(tensor, device="meta") for tensor in tensors)
    before: Mapping[str, Mapping[str, Any]] = attributes_of(model)
    ways, outside = ways_to_trace(device), Outside(model)
    ways = [way for way in ways if way.as_eager or not as_eager]
    for way in ways:
        try:
            first = _Recorded(model, call, own_loss, way.as_eager)
            exported = _traced(first, given, grad, way)
            after = first.output.attributes
            if outside.holds_tensors():
                outside.refuse()
            left = outside.values()
            if changes_in(before, after) or outside.changes():
                # A first call may prepare a model, if it and later calls do the same.
                later = _Recorded(model, call, own_loss, way.as_eager)
                with left_by(model, after):
                    again = _traced(later, given, grad, way)
                if does_the_same(again, exported) and _is_in(later.output.attributes, after):
                    before = after
                if not does_the_same(again, exported) or changes_in(left, outside.values()):
                    outside.refuse()
            break
        except AtomError:
            raise
        except Exception as error:  # whatever forward raises
            if way is ways[-1]:
                raise AnalysisError(_cannot_export(model, error)) from error
            reason = reason_of(error)
    if way is not ways[0]:
        _log.warning(
            "%s is traced %s, so its results may differ in their last bits: %s",
            type(model).__name__, way.told(device), reason,
        )  # fmt: skip
    check_side_effects(before, after)
    _check_assigned(model, exported, first.output.assigned)
    return exported


def _check_assigned(model: nn.Module, exported: Exported, assigned: Mapping[str, Tensor]) -> None:
    """Raise `AnalysisError` if forward puts another tensor in the place of one that it reads
    before, or of a buffer that is saved: what it put there would be lost."""
    read = {name for node, (name, _) in exported.buffers.items() if node.users}
    literals = {literal.data_ptr() for node, literal in exported.literals.items() if node.users}
    literals.discard(0)  # of those without data
    for name, was in assigned.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        is_saved = last in module._buffers and last not in module._non_persistent_buffers_set
        is_read = name in read or (last not in module._buffers and _address(was) in literals)
        if is_saved or is_read:
            raise AnalysisError(
                f"forward puts another tensor in the place of {name!r}, which would be lost; "
                f"write with copy_() into a registered buffer, {MANUAL}"
            )


def _address(tensor: Tensor) -> int:
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()


def does_the_same(one: Exported, other: Exported) -> bool:
    """Return whether two calls of a model, exported just now, are the same operations."""
    if len(one.literals) != len(other.literals):
        return False
    literals = zip(one.literals.values(), other.literals.values(), strict=True)
    return _operations(one) == _operations(other) and all(
        mine.dtype == its.dtype and torch.equal(mine, its) for mine, its in literals
    )


def _operations(exported: Exported) -> list[tuple[str, ...]]:
    return [
        (node.name, node.op, str(node.target), str(node.args), str(node.kwargs))
        for node in exported.graph.nodes
    ]


def _is_in(attributes: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any]) -> bool:
    return all(
        name in known.get(path, {}) and known[path][name] == value
        for path, own in attributes.items()
        for name, value in own.items()
    )


def _traced(recorded: _Recorded, given: Sequence[Tensor], grad: bool, way: Way) -> Exported:
    """Trace one of several equal modules, or each of them if they might not be equal after all.

    The latter takes longer and gives the same; that it happened is logged. Any other error is that
    of the model, or one of ours: tracing every module would not mend it.
    """
    equal = equal_modules(recorded)
    recorded.known = attributes_of(recorded.model)
    functions = Functions()
    if equal:
        try:
            with StandIns(equal) as stand_ins:
                program = _program(recorded, given, grad, way.device, functions)
            return _flatten(recorded, program, functions, stand_ins.paths, way.device)
        except Exception as error:
            reason = why_unequal(error)
            if reason is None:
                raise
            _log.info("every module of %s is traced: %s", type(recorded.model).__name__, reason)
            recorded.output, functions = _Output(), Functions()
    program = _program(recorded, given, grad, way.device, functions)
    return _flatten(recorded, program, functions, (), way.device)


def _program(
    recorded: _Recorded,
    given: Sequence[Tensor],
    grad: bool,
    device: torch.device,
    functions: Functions,
) -> torch.export.ExportedProgram:
    state = torch.get_rng_state()
    try:
        with (
            only_torch_draws(), torch.set_grad_enabled(grad), quiet(), without_collector(),
            seeming_on(device), functions.noted(), without_hooks(), DataAndPlaces(),
            restored_if_failed(recorded.model), plain_trace(),
        ):  # fmt: skip
            program = torch.export.export(recorded, tuple(given), strict=False)
            if any(isinstance(value, FakeTensor) for value in program.constants.values()):
                raise RuntimeError(_LIFTED)  # as torch itself does since 2.10
            return program
    finally:
        torch.set_rng_state(state)


def _flatten(
    recorded: _Recorded,
    program: torch.export.ExportedProgram,
    functions: Functions,
    calls: Sequence[str],
    device: torch.device,
) -> Exported:
    signature = program.graph_signature
    if any(spec.kind is InputKind.CUSTOM_OBJ for spec in signature.input_specs):
        raise AnalysisError(_OBJECT)
    names = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    flat = Flattener(program.graph_module, functions)
    graph = flat.run(program.graph)
    moved = flat.moved
    model_parameters = dict(recorded.named_parameters(remove_duplicate=False))
    model_buffers = dict(recorded.named_buffers(remove_duplicate=False))
    prefix = "model."
    if calls:
        targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        repeat(graph, {target: moved[names[name]] for name, target in targets.items()}, calls)
    literals = {}
    for name, target in signature.inputs_to_lifted_tensor_constants.items():
        literal = program.constants[target].detach()
        # On a GPU, code that makes a tensor there has made it already.
        literals[moved[names[name]]] = literal if literal.is_meta else literal.cpu()
    return Exported(
        graph,
        {
            moved[names[name]]: model_parameters[target]
            for name, target in signature.inputs_to_parameters.items()
        },
        {
            moved[names[name]]: (target.removeprefix(prefix), model_buffers[target])
            for name, target in signature.inputs_to_buffers.items()
        },
        literals,
        {moved[names[name]]: index for index, name in enumerate(signature.user_inputs)},
        recorded.output.rebuild,
        device,
    )


def _cannot_export(model: nn.Module, error: BaseException) -> str:
    # The stack of the first error: those that wrap it were raised inside torch.
    first: BaseException = error
    while first.__cause__ is not None or first.__context__ is not None:
        first = first.__cause__ or first.__context__  # type: ignore[assignment]
    place = "its forward"
    for tried in (error, first):
        for frame in traceback.extract_tb(tried.__traceback__):
            if not frame.filename.startswith((*INNER, "<")):
                place = f"{frame.filename}:{frame.lineno} ({frame.line})"
    reason = reason_of(first) or type(first).__name__
    if "torch._C.Generator" in reason:  # of torch 2.9
        return _OBJECT
    if "data-dependent" in str(error) or "DataDependent" in type(first).__name__:
        reason = "what runs depends on data"
    elif _LIFTED in str(error):
        reason = "it works on a tensor's .data, past autograd and past what is traced"
    return f"cannot analyse {type(model).__name__} at {place}: {reason}; change that line, {MANUAL}"
