"""Compiled templates: one for each kind of layer, whatever the depth; the model's own result."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import atomtrain
from atomtrain.analysis.costs.costs import layer_costs
from atomtrain.analysis.layers.front import OwnCode
from atomtrain.analysis.layers.trace import chain_of
from atomtrain.engine.execution.compiled import (
    CACHE_VARIABLE,
    CompiledLayer,
    compiled,
    require_compilable,
)
from atomtrain.engine.execution.offload import Offload, Package
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.shape import Activation, Shape
from tests.support import vision_models
from tests.support.injecting import device_with
from tests.support.own_backward import own_backward
from tests.support.planning_models import use_shape
from tests.support.reference import assert_equal_training, train, twin
from tests.support.several import train_in_shares
from tests.support.swapped import adamw, deep_gpt, gpt, random_delays, swap, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")
PARTITIONED = "aot_eager_decomp_partition"
"""Divides forward and backward and chooses what is saved as the real compiler does, and needs no
compiler for what is left."""
COMPILER = os.environ.get("CXX", "g++")
COMPILING = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no {COMPILER}"),
]
BACKENDS = [PARTITIONED, pytest.param("inductor", marks=COMPILING)]
MIXED: tuple[Activation, ...] = ("offload", "recompute", "keep")
BOUNDS = (0, 1, 3, 4)


def opened(model: nn.Module, example: Any, device: Any, **options: Any) -> atomtrain.Engine:
    """Return an engine whose layers shall be compiled."""
    return atomtrain.swap(
        model,
        example,
        optimizer=adamw,
        device=device,
        options=atomtrain.Options(compile=True, **options),
    )


@pytest.fixture(autouse=True)
def _compiler_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave to other tests nothing that was compiled here, and to the user no cache."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run what would be compiled operation by operation; list what was handed over."""
    handed: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        handed.append(graph)
        return graph.forward

    use_backend(monkeypatch, backend)
    return handed


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Let engines compile by another backend of `torch.compile`."""
    monkeypatch.setattr("atomtrain.engine.api.compiled", lambda *given: compiled(*given, backend))
    if backend != "inductor":
        monkeypatch.setenv("CXX", sys.executable)  # any program: none is needed here


def use_waiting(monkeypatch: pytest.MonkeyPatch, mix: tuple[Activation, ...]) -> None:
    """Let graphs of the segments below the last one wait in these ways."""
    shape = Shape(BOUNDS, (*BOUNDS, 5), 2, 2, activations=(*mix, "recompute"))
    use_shape(monkeypatch, shape)


def resident(
    model: nn.Module,
    steps: list[list[dict[str, Tensor]]],
    backend: str,
    devices: int = 1,
    weights: list[float] | None = None,
) -> tuple[list[float], torch.optim.Optimizer]:
    """Train a model whose layers are compiled by an ordinary loop; return the losses."""
    traced = chain_of(model, steps[0][0], None, None)
    costs = layer_costs(traced.chain, traced.bind(steps[0][0]))
    chain = compiled(traced.chain, costs, torch.device("cpu"), backend)
    optimizer = adamw(model.parameters())

    def loss_of(_: nn.Module, micro_batch: Any) -> Tensor:
        return chain.loss_of(traced.bind(micro_batch))

    losses = train_in_shares(model, steps, optimizer, devices, loss_of, weights=weights)
    return losses, optimizer


def test_a_deeper_model_compiles_no_more(graphs: list[Any]) -> None:
    counts = []
    for layers in (2, 6):
        torch.manual_seed(0)
        model, steps = gpt(tied=False, layers=layers), token_batches(2)
        reference = twin(model)
        optimizer = adamw(reference.parameters())
        expected = train(reference, steps, optimizer)
        torch._dynamo.reset()
        graphs.clear()
        with opened(model, steps[0][0], "cpu", micro_batches=2, segments=layers + 2) as engine:
            assert [engine.step(step) for step in steps] == expected
            assert_equal_training(engine, reference, optimizer)
        counts.append(len(graphs))
    assert counts == [2, 2], "block and head, whether with or without gradients"


@pytest.mark.parametrize(
    ("mix", "backend", "weights"),
    [
        *(
            (mix, PARTITIONED, None)
            for mix in (("recompute",) * 3, ("keep",) * 3, ("offload",) * 3)
        ),
        (MIXED, PARTITIONED, None),
        (MIXED, PARTITIONED, [5, 46]),
        pytest.param(MIXED, "inductor", None, marks=COMPILING),
    ],
)
def test_every_way_to_wait_has_the_bits_of_a_resident_loop(
    monkeypatch: pytest.MonkeyPatch,
    mix: tuple[Activation, ...],
    backend: str,
    weights: list[float] | None,
) -> None:
    model, steps = deep_gpt(0.2, tied=False), token_batches(2, steps=2)
    reference = twin(model)
    state = torch.get_rng_state()
    expected, optimizer = resident(reference, steps, backend, weights=weights)
    torch.set_rng_state(state)
    torch._dynamo.reset()
    use_waiting(monkeypatch, mix)
    use_backend(monkeypatch, backend)
    example = steps[0][0]
    inject = random_delays(1)
    with swap(model, example, micro_batches=2, compile=True, inject=inject) as engine:
        assert [engine.step(step, weights) for step in steps] == expected
        assert_equal_training(engine, reference, optimizer)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_several_devices_have_the_bits_of_a_loop_that_adds_in_shares(
    monkeypatch: pytest.MonkeyPatch, activations: Activation, backend: str
) -> None:
    model, steps = deep_gpt(0.2, tied=False), token_batches(3, steps=2)
    reference = twin(model)
    state = torch.get_rng_state()
    expected, optimizer = resident(reference, steps, backend, devices=2)
    torch.set_rng_state(state)
    torch._dynamo.reset()
    use_backend(monkeypatch, backend)
    devices = device_with(random_delays(1), ["emulated:1GiB/s"] * 2, "64MiB")
    options = {"micro_batches": 3, "segments": 4, "activations": activations}
    with opened(model, steps[0][0], devices, **options) as engine:
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, optimizer)
        for device in engine.devices:
            assert 0 < device.peak_bytes() <= engine.plan.device_peak_bytes


def test_devices_that_need_the_same_code_at_once_compile_it_once(graphs: list[Any]) -> None:
    example = torch.ones(2, 4)
    traced = chain_of(nn.Sequential(nn.Linear(4, 4)), example, torch.sum, None)
    inputs = traced.bind(example)
    costs = layer_costs(traced.chain, inputs)
    began = threading.Barrier(2)

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        time.sleep(0.05)
        return graph.forward

    chain = compiled(traced.chain, costs, torch.device("cpu"), backend)  # type: ignore[arg-type]

    def loss(_: int) -> float:
        began.wait(10)
        return float(chain.loss_of(inputs).detach())

    with ThreadPoolExecutor(2) as pool:
        losses = list(pool.map(loss, range(2)))
    assert losses[0] == losses[1]
    assert len(graphs) == len([one for one in chain.layers if isinstance(one, CompiledLayer)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_planned_to_leave_is_what_compiled_code_saves(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    sent: list[int] = []
    send = Offload.send

    def counting(self: Offload, tensor: Tensor, package: Package) -> Any:
        sent.append(package.n_bytes)
        return send(self, tensor, package)

    monkeypatch.setattr(Offload, "send", counting)
    use_waiting(monkeypatch, ("recompute", "offload", "recompute"))
    use_backend(monkeypatch, backend)
    model, (step,) = deep_gpt(0.2, tied=False), token_batches(1, steps=1)
    with swap(model, step[0], compile=True) as engine:
        block = engine.planner.costs.layers[1].saved
        engine.step(step)
        assert not engine.planner.costs.remakes
    # Two blocks; the value between them is saved by one of them or both.
    value_bytes = step[0]["input_ids"].numel() * 16 * 4
    values = sum(sent) - 2 * block.sent_bytes
    assert values in (value_bytes, 2 * value_bytes)


class _Watching(TorchDispatchMode):
    """Takes note of each operation that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_watches_operations_does_not_hinder_compiling() -> None:
    example = torch.ones(2, 4)
    traced = chain_of(nn.Sequential(nn.Linear(4, 4)), example, torch.sum, None)
    inputs = traced.bind(example)
    costs = layer_costs(traced.chain, inputs)
    handed: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        handed.append(graph)
        return graph.forward

    chain = compiled(traced.chain, costs, torch.device("cpu"), backend)
    with torch.no_grad(), _Watching() as watching:
        chain.loss_of(inputs)
    assert len(handed) == len([layer for layer in chain.layers if isinstance(layer, CompiledLayer)])
    assert "aten.addmm.default" not in watching.seen


def test_on_the_host_of_a_gpu_layers_run_operation_by_operation() -> None:
    example = torch.ones(2, 4)
    traced = chain_of(nn.Sequential(nn.Linear(4, 4)), example, torch.sum, None)
    inputs = traced.bind(example)
    costs = layer_costs(traced.chain, inputs)
    chain = compiled(traced.chain, costs, torch.device("cuda"))
    assert isinstance(chain.layers[0], CompiledLayer)
    assert torch.equal(chain.loss_of(inputs), traced.chain.loss_of(inputs))


def test_a_function_with_a_backward_of_its_own_runs_as_it_is(
    graphs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    case = own_backward(3)
    reference, batches = twin(case.model), [[case.draw()] for _ in range(2)]
    optimizer = adamw(reference.parameters())
    expected = train(reference, batches, optimizer, lambda model, batch: model(**batch)["loss"])
    with swap(case.model, batches[0][0], segments=3, compile=True) as engine:
        assert [engine.step(step) for step in batches] == expected
        assert_equal_training(engine, reference, optimizer)
    assert "has a torch.autograd.Function, so it is not compiled" in caplog.text
    assert not any(isinstance(layer, CompiledLayer) for layer in engine.planner.chain.layers[:3])


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.usefixtures("graphs")
def test_what_is_compiled_is_kept_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, own: bool, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if own:
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    with opened(gpt(), token_batches(1)[0][0], "cpu"):
        expected = tmp_path / ("elsewhere" if own else "atomtrain/compiled")
        assert os.environ[CACHE_VARIABLE] == str(expected)


def test_what_a_gpu_needs_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    card: Any = SimpleNamespace(name="GTX 1080 Ti", torch_device=torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (6, 1))
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    with pytest.raises(ConfigError, match=r"needs Triton, .*pip install triton"):
        require_compilable(card)
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: True)
    with pytest.raises(ConfigError, match=r"GTX 1080 Ti has compute capability 6\.1, and"):
        require_compilable(card)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 0))
    require_compilable(card)


@pytest.mark.parametrize("device", ["emulated", "cpu"])
def test_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="there is no no-such-compiler; install it"):
        opened(gpt(), token_batches(1)[0][0], device)


def test_a_compiler_that_fails_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(*_: Any) -> Any:
        raise RuntimeError("no Python.h\nand much more")

    use_backend(monkeypatch, backend)
    with pytest.raises(
        ConfigError, match=r"cannot be compiled: .*no Python\.h; .*turn compile off"
    ) as e:
        opened(gpt(), token_batches(1)[0][0], "cpu")
    assert "\n" not in str(e.value)


def test_measuring_writes_nothing_to_the_terminal() -> None:
    code = (
        "import torch; from atomtrain.engine.calibration.compiled_costs import _growth_bytes; "
        "from types import SimpleNamespace as S; "
        "device = S(torch_device=torch.device('cpu')); "
        "print(_growth_bytes(device, lambda: torch.ones(1024)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("4096\n", "")


def test_a_front_is_not_compiled_since_images_have_any_sizes() -> None:
    model, draw = vision_models.qwen3_vl()
    traced = chain_of(model, draw())
    costs = layer_costs(traced.chain, traced.bind(draw()))
    layers = compiled(traced.chain, costs, torch.device("cpu"), PARTITIONED).layers
    own_code = [isinstance(layer.module, OwnCode) for layer in traced.chain.layers]
    assert any(own_code)
    assert [not isinstance(layer, CompiledLayer) for layer in layers] == own_code
