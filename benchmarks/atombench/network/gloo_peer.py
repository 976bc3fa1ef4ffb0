"""One peer of the baselines over Gloo: pipeline and data parallelism, and a probe of the link."""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from atombench.links.connections import sent_bytes, set_congestion_control
from atombench.links.peers import Reply
from atombench.links.shaping import congestion_control
from atombench.network.baselines import DataParallel, LibraryStage, SwappedParallel
from atombench.network.model import Batch, ModelSetup, fused_adamw, merged, run_layers
from atombench.network.pipeline import (
    Beside,
    RankPlan,
    Stage,
    decode,
    dry_stage,
    encode,
    share_of_pipeline,
)
from atomtrain.analysis.costs.storages import StorageTracker

_PROBES = 3
_REPEATS = 3
_TURNS = 5
"""In which speeds are measured, some seconds apart in all."""


class GlooPeer:
    """Trains the baselines; what needs no network needs no `enter` before."""

    def __init__(self) -> None:
        self.rank, self.ranks = 0, 1
        self._groups: dict[int, list[Any]] = {}
        self._control = congestion_control()

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        return {
            "enter": self.enter,
            "congestion": self.congestion,
            "probe": self.probe,
            "speeds": self.speeds,
            "pipeline": self.pipeline,
            "pipeline_memory": self.pipeline_memory,
            "pipeline_compute": self.pipeline_compute,
            "data_parallel": self.data_parallel,
            "swapped_parallel": self.swapped_parallel,
        }

    def enter(
        self, address: str, port: int, rank: int, ranks: int, interface: str, timeout_s: float
    ) -> Reply:
        """Join the process group whose first rank listens at `address`."""
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        self.rank, self.ranks = rank, ranks
        dist.barrier()
        return {}

    def congestion(self, control: str) -> Reply:
        """Have all connections use a congestion control, by Linux's name, from now on.

        Returns in `control` what they use: this machine's where the kernel refuses.
        """
        try:
            set_congestion_control(control)
        except OSError:
            control = congestion_control()
        self._control = control
        return {"control": control}

    def probe(self, probe_bytes: int, both_ways_bytes: int) -> Reply:
        """Measure the link between the last two ranks.

        Returns the round trip, the rate of one transfer, and the rate each way of two at once: the
        better of two tries.
        """
        mine, other = self.rank - (self.ranks - 2), (self.rank ^ 1)
        if self.ranks % 2:
            other = 2 * self.ranks - 3 - self.rank
        if mine < 0:
            return {}
        small, large = torch.zeros(1), torch.zeros(probe_bytes, dtype=torch.uint8)
        trips_s = []
        for _ in range(_PROBES):
            trips_s.append(_there_and_back(small, other, mine == 0))
        # A first transfer widens TCP's window; the round trip of the acknowledgement is known.
        for _ in range(2):
            started_s = time.monotonic()
            if mine == 0:
                dist.send(large, other)
                dist.recv(small, other)
            else:
                dist.recv(large, other)
                dist.send(small, other)
            took_s = time.monotonic() - started_s
        way_s = min(trips_s)
        both_s = min(_both_ways_s(both_ways_bytes, other) for _ in range(2))
        return {
            "round_trip_s": way_s,
            "bits_per_s": 8 * probe_bytes / max(took_s - way_s, 1e-9),
            "both_ways_bits_per_s": 8 * both_ways_bytes / max(both_s - way_s, 1e-9),
        }

    def speeds(self, model: dict[str, Any], micro_batches: list[int]) -> Reply:
        """Time each kind of layer at each size of micro-batch, and each wire format.

        Seconds are those of a core of the peer's own: with more peers than cores, what the others
        have of it does not count.

        Returns for each size: `forward_s`, `backward_s`, `kept_bytes` of `embedding`, `block` and
        `head`, and `wire_s` (encoding and decoding) by format; and `update_parameters_per_s`. All
        are the least of several turns, so that a moment in which something else had the core does
        not make the peer seem slow, and with it links that stand for others too slow as well.
        """
        turns = [self._speeds_once(model, micro_batches) for _ in range(_TURNS)]
        return {
            "sizes": merged([turn["sizes"] for turn in turns], min),
            "update_parameters_per_s": max(turn["update_parameters_per_s"] for turn in turns),
        }

    def _speeds_once(self, model: dict[str, Any], micro_batches: list[int]) -> Reply:
        setup = ModelSetup.from_json(model)
        net = setup.model()
        layers = net.chain_layers()
        optimizer = fused_adamw(net.parameters())
        kinds = {"embedding": layers[0], "block": layers[1], "head": layers[-1]}
        found: dict[str, Any] = {}
        for size in micro_batches:
            batch = setup.micro_batches(0, size, size)[0]
            hidden = torch.randn(size, setup.sequence_tokens, setup.width)
            times = {}
            for kind, layer in kinds.items():
                values = {name: hidden for name in layer.reads if name.startswith("hidden")}
                times[kind] = _time_layer(layer, {**batch, **values})
            wires = {wire: _time_wire(hidden, wire) for wire in ("bfloat16", "int8")}
            found[str(size)] = {**times, "wire_s": wires}
        started_s = 0.0
        for _ in range(_REPEATS):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            started_s = time.thread_time()
            optimizer.step()
        elapsed_s = time.thread_time() - started_s
        return {"sizes": found, "update_parameters_per_s": setup.parameters / elapsed_s}

    def pipeline(
        self,
        model: dict[str, Any],
        plan: dict[str, Any],
        sequences: int,
        steps: int,
        warm_up: int,
    ) -> Reply:
        """Train `steps` steps of `sequences` sequences as a pipeline, or as several.

        `compute_s` is what the operations of a step took of a core meanwhile.
        """
        setup = ModelSetup.from_json(model)
        stage = self._stage(setup, plan)
        set_congestion_control(self._control)  # several pipelines have connections of their own
        pipelines = plan["pipelines"]
        mine = self.rank // (self.ranks // pipelines)

        def step(index: int) -> float | None:
            batches = setup.micro_batches(index, sequences, plan["micro_batch"])
            return stage.step(batches[mine::pipelines])

        reply = self._measured(step, steps, warm_up)
        return {**reply, "compute_s": statistics.fmean(stage.compute_s[warm_up:])}

    def pipeline_memory(
        self, model: dict[str, Any], plan: dict[str, Any], sequences: int, rank: int, ranks: int
    ) -> Reply:
        """Run a step without the network, on zeros, and return the device bytes that it takes.

        `rank` and `ranks` are those of all pipelines; averaging between them, when nothing is left
        of a step but the gradients, takes less than what the step kept.
        """
        setup = ModelSetup.from_json(model)
        tracker = StorageTracker()
        with tracker:
            stage = dry_stage(setup, plan, rank, ranks)
            for parameter in stage.parameters:
                tracker.adopt(parameter)
                parameter.grad = torch.zeros_like(parameter)
            stage.optimizer.step()  # the moments exist from the first step on
            stage.optimizer.zero_grad(set_to_none=True)
            tracker.reset_peak()
            stage.step(share_of_pipeline(setup, plan, sequences))
        return {"device_peak_bytes": tracker.peak_bytes}

    def pipeline_compute(
        self, model: dict[str, Any], plan: dict[str, Any], sequences: int, rank: int, ranks: int
    ) -> Reply:
        """Run a step's operations without the network, on zeros; return a core's seconds for them.

        `rank` and `ranks` are those of all pipelines. With more peers than cores, what the others
        have of the core does not count.
        """
        setup = ModelSetup.from_json(model)
        stage, batches = (
            dry_stage(setup, plan, rank, ranks),
            share_of_pipeline(setup, plan, sequences),
        )
        stage.compute(batches)
        return {"compute_s": stage.compute_s[0]}

    def data_parallel(
        self, model: dict[str, Any], micro_batch: int, steps: int, warm_up: int
    ) -> Reply:
        """Train with float32 gradients averaged in every step, overlapping the last backward."""
        parallel = DataParallel(ModelSetup.from_json(model))

        def step(index: int) -> float:
            return parallel.step(self._own_share(parallel.setup, index, micro_batch))

        return self._measured(step, steps, warm_up)

    def swapped_parallel(
        self,
        model: dict[str, Any],
        micro_batch: int,
        device_link_bytes_per_s: float,
        device_memory_bytes: int,
        steps: int,
        warm_up: int,
    ) -> Reply:
        """Train as `data_parallel`, with ATOM's engine within its budget; on the same samples."""
        setup = ModelSetup.from_json(model)
        with SwappedParallel(
            setup, micro_batch, device_link_bytes_per_s, device_memory_bytes
        ) as engine:

            def step(index: int) -> float:
                return engine.step(self._own_share(setup, index, micro_batch))

            return self._measured(step, steps, warm_up, engine.wait)

    def _own_share(self, setup: ModelSetup, step: int, micro_batch: int) -> list[Batch]:
        """Return what this rank adds to a step of data parallelism."""
        seed = step * self.ranks + self.rank
        return setup.micro_batches(seed, setup.sequences_per_peer, micro_batch)

    def _stage(self, setup: ModelSetup, plan: dict[str, Any]) -> Stage | LibraryStage:
        pipelines = plan["pipelines"]
        stages = self.ranks // pipelines
        if plan["schedule"] == "own":
            stage = self.rank % stages
            beside = None
            if pipelines > 1:
                beside = Beside(self.rank - stage, self._same_stage(stages, stage), pipelines)
            return Stage(setup, RankPlan.of(plan, stage), stage, stages, beside)
        return LibraryStage(setup, plan, self.rank, self.ranks)

    def _same_stage(self, stages: int, stage: int) -> Any:
        """Return the group of the ranks with the same stage, of pipelines of `stages` each."""
        if stages not in self._groups:
            # Every rank makes all groups, in the same order.
            self._groups[stages] = [
                dist.new_group(list(range(first, self.ranks, stages))) for first in range(stages)
            ]
        return self._groups[stages][stage]

    def _measured(
        self,
        step: Callable[[int], float | None],
        steps: int,
        warm_up: int,
        settle: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Time some steps after others; `settle` waits for what of them still goes on."""
        for index in range(warm_up):
            step(index)
        settle()
        dist.barrier()
        before_bytes, started_s = sent_bytes(), time.monotonic()
        losses = [step(warm_up + index) for index in range(steps)]
        settle()
        ended_s = time.monotonic()
        dist.barrier()
        return {
            "started_s": started_s,
            "ended_s": ended_s,
            "sent_bytes": sent_bytes() - before_bytes,
            "losses": [loss for loss in losses if loss is not None],
        }


def _there_and_back(token: torch.Tensor, other: int, first: bool) -> float:
    started_s = time.monotonic()
    if first:
        dist.send(token, other)
        dist.recv(token, other)
    else:
        dist.recv(token, other)
        dist.send(token, other)
    return time.monotonic() - started_s


def _both_ways_s(sent_bytes: int, other: int) -> float:
    going, coming = (torch.zeros(sent_bytes, dtype=torch.uint8) for _ in range(2))
    started_s = time.monotonic()
    for work in (dist.irecv(coming, other), dist.isend(going, other)):
        assert work is not None
        work.wait()
    return time.monotonic() - started_s


def _time_layer(layer: Any, values: Batch) -> dict[str, float]:
    forward_s, backward_s = [], []
    kept_bytes = 0
    for repeat in range(_REPEATS + 1):
        given = {
            name: v.clone().requires_grad_() if v.is_floating_point() else v
            for name, v in values.items()
        }
        tracker = StorageTracker() if repeat == 0 else None
        started_s = time.thread_time()
        with tracker or contextlib.nullcontext():
            out = run_layers([layer], given)
        middle_s = time.thread_time()
        if tracker is not None:
            kept_bytes = tracker.live_bytes
        gradient = torch.ones_like(out)
        out.backward(gradient)
        if repeat > 0:  # the first one, counted, also makes the gradients
            forward_s.append(middle_s - started_s)
            backward_s.append(time.thread_time() - middle_s)
        del out
    return {
        "forward_s": min(forward_s),
        "backward_s": min(backward_s),
        "kept_bytes": float(kept_bytes),
    }


def _time_wire(hidden: torch.Tensor, wire: str) -> float:
    times_s = []
    for _ in range(_REPEATS):
        started_s = time.thread_time()
        decode(encode(hidden, wire), wire, hidden.shape)
        times_s.append(time.thread_time() - started_s)
    return min(times_s)
