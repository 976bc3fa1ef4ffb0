"""ATOM against a pipeline and against data parallelism, on links from fast to very slow.

Real processes, each in a network namespace, joined by links of given rate and round trip
(`shaping`). All methods train the same model with the same optimizer on as many tokens a step, on
the same cores: each peer has one thread and, with as many cores as peers, a core of its own that
its helpers share. Tokens per second are those of all peers together.

- *ATOM*: each peer swaps the whole model through an emulated device; the swarm averages fragments
  in the background. The emulated link to the host has as many bytes for each FLOP of this processor
  as the named GPU's has, so swapping is not made easier than it is there.
- *Pipeline*: the model is cut into stages that stay on devices of at least as much memory, without
  swapping. For each link the best of many configurations is searched (`pipeline_search`), then
  measured before and after ATOM; the faster of the two counts.
- *Data parallel*: every peer holds everything (more than the budget) and averages float32 gradients
  in every step with PyTorch's `DistributedDataParallel`, which overlaps the last backward.

A processor is far slower than a GPU, so on equal links it waits less for the network. Rows with
`stands_for` therefore slow the link: without a model until `bits_per_flop`, the rate for each FLOP
that a peer really computes, is that of the GPU on its link; with a model until the time to send a
token's activations, for the time to compute it, is that of the GPU, link *and model*. The first
makes averaging as hard as it is there, but a pipeline of this small model much harder than one of a
large model; the second makes the pipeline as hard as it is there, but averaging easier.
`docs/network.md` says more.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from atomtrain.benchmarks.churn import _terminable
from atomtrain.benchmarks.common import (
    BenchmarkOptions,
    Result,
    description,
    keep_partial,
    progress,
)
from atomtrain.benchmarks.network_atom_method import LOSSES_OF_PEERS
from atomtrain.benchmarks.network_measured import Measured
from atomtrain.benchmarks.network_methods import Methods
from atomtrain.benchmarks.network_peers import PeerError
from atomtrain.benchmarks.network_rows import largest_ratio, rounds_finished
from atomtrain.benchmarks.network_setup import (
    ALONE_LINKS,
    QUICK,
    UNSHAPED_BITS_PER_S,
    Case,
    NetworkSetup,
    cases,
)
from atomtrain.benchmarks.pipeline_search import Speeds
from atomtrain.benchmarks.shaping import Network
from atomtrain.units import format_count, format_seconds

_QUIET_LOAD = 0.5
"""Processes that want a core, on average over a minute, beside which measurements still hold."""


def run(options: BenchmarkOptions, setup: NetworkSetup | None = None) -> Result:
    """Measure, and return the keys of the benchmarks' contract and the inputs.

    Args:
        options: `quick` takes a smaller model and two rates.
        setup: Inputs of one's own.

    Raises:
        ConfigError: this machine or user cannot make network namespaces; says what is needed.
        PlanError: a stage, or a segment, does not fit the device budget.
        PeerError: the peers could not be started at all.
    """
    setup = setup or (QUICK if options.quick else NetworkSetup())
    if options.peers is not None:
        setup = replace(setup, peers=options.peers)
    if options.links == "plain":
        setup = replace(setup, stand_ins=())
    elif options.links == "stand-ins":
        setup = replace(setup, links=())
    elif options.links == "alone":
        setup = replace(setup, links=ALONE_LINKS, stand_ins=(), baselines=False)
    started_s = time.monotonic()
    load = os.getloadavg()[0]
    if load > _QUIET_LOAD:
        progress(
            f"this machine is busy (load {load:.1f}): a pipeline suffers more from that than ATOM "
            "does, so the ratios will be too good; run again when it is quiet"
        )
    rows: list[Result] = []
    result: Result = {}
    with (
        _terminable(),
        tempfile.TemporaryDirectory(prefix="atom-network-") as folder,
        Network(setup.peers) as network,
        Methods(setup, network, Path(folder)) as methods,
    ):
        speeds = methods.speeds()
        flops_per_s = speeds.tokens_per_s(setup.model) * setup.model.flops_per_token
        progress(f"a peer computes {flops_per_s / 1e9:.1f} GFLOP/s")
        wanted = cases(setup, flops_per_s)
        for case in wanted:
            if rows and time.monotonic() - started_s > setup.total_s:
                break
            rows.append(_row(case, setup, methods, speeds, flops_per_s))
            progress(f"{time.monotonic() - started_s:4.0f} s: {_sentence(rows[-1])}")
            result = {
                "rows": rows,
                "load_average_before": load,
                "links_left_out": len(wanted) - len(rows),
                "largest_ratio": largest_ratio(rows),
                "simulation": _simulation(rows),
                **_setting(setup, methods, speeds, flops_per_s),
            }
            keep_partial(result, options.out)
    return result


def _setting(setup: NetworkSetup, methods: Methods, speeds: Speeds, flops_per_s: float) -> Result:
    return {
        "peers": setup.peers,
        "parameters": setup.model.parameters,
        "state_bytes": setup.model.state_bytes,
        "device_budget_bytes": setup.budget_bytes,
        "tokens_per_step": setup.step_sequences * setup.model.sequence_tokens,
        "peer_flops_per_s": flops_per_s,
        "speeds": speeds._asdict(),
        "compute_bound_tokens_per_s": setup.peers * speeds.tokens_per_s(setup.model),
        "boundary_bits_per_flop": setup.model.boundary_bits_per_flop,
        "plan": methods.atom.plan,
        "micro_batch_step_s": {str(k): v for k, v in methods.atom.micro_batches.items()},
        "inputs": setup.to_json(),
        **description(),
    }


def _row(
    case: Case, setup: NetworkSetup, methods: Methods, speeds: Speeds, flops_per_s: float
) -> Result:
    """Measure one link with every method; what fails is named and leaves `None`."""
    rate = case.link.bits_per_s or UNSHAPED_BITS_PER_S
    row: Result = {
        "link_bits_per_s": rate,
        "shaped": case.link.bits_per_s is not None,
        "round_trip_s": case.link.round_trip_s,
        "bits_per_flop": rate / flops_per_s,
        "stands_for": case.stands_for._asdict() if case.stands_for else None,
    }
    errors: list[str] = []
    bound = setup.peers * speeds.tokens_per_s(setup.model)
    methods.network.shape(case.link)
    _try(errors, lambda: row.update({"probe": methods.probe(case.link)}))
    with_others = setup.baselines
    before = _try(errors, lambda: _pipeline(case, setup, methods, speeds)) if with_others else None
    atom = _try(errors, lambda: methods.atom.measure(case.link, speeds))
    methods.network.shape(case.link)
    if before is not None:
        after = _try(errors, lambda: methods.pipeline(before["search"], setup.window_s))
        row["pipeline"] = _pipeline_result(before, after, bound)
    parallel: Measured | str | None = "not asked for"
    if with_others:
        parallel = _try(errors, lambda: methods.data_parallel(case.link, speeds))
    row["data_parallel_tokens_per_s"] = None
    if isinstance(parallel, str):
        row["data_parallel"] = {"left_out": parallel}
    elif parallel is not None:
        row["data_parallel_tokens_per_s"] = parallel.tokens_per_s
        row["data_parallel"] = _plain(parallel, bound)
    if atom is not None:
        del atom[LOSSES_OF_PEERS]
        row["atom"] = {**atom, "utilisation": atom["tokens_per_s"] / bound}
    ours = atom["tokens_per_s"] if atom else None
    theirs = row["pipeline"]["tokens_per_s"] if before else None
    row["atom_tokens_per_s"], row["pipeline_tokens_per_s"] = ours, theirs
    row["ratio"] = ours / theirs if ours and theirs else None
    row["rounds_finished"] = rounds_finished(row)
    row["errors"] = errors
    return row


def _pipeline(case: Case, setup: NetworkSetup, methods: Methods, speeds: Speeds) -> dict[str, Any]:
    search = methods.search(case.link, speeds, time.monotonic() + setup.case_s / 2)
    return {
        "search": search,
        "device_peak_bytes": methods.pipeline_memory(search),
        "measured": methods.pipeline(search, setup.window_s),
    }


def _pipeline_result(found: dict[str, Any], after: Measured | None, bound: float) -> Result:
    search, both = found["search"], [found["measured"], *([after] if after else [])]
    fastest = max(both, key=lambda measured: measured.tokens_per_s)
    return {
        **_plain(fastest, bound),
        "tokens_per_s_of_both": [measured.tokens_per_s for measured in both],
        "pipeline": search.best.name(),
        "step_sequences": search.sequences,
        "predicted_tokens_per_s": search.predicted_tokens_per_s,
        "considered": search.considered,
        "trials": search.trials,
        "device_peak_bytes": found["device_peak_bytes"],
    }


def _plain(measured: Measured, bound: float) -> Result:
    return {**measured.plain(), "utilisation": measured.tokens_per_s / bound}


def _simulation(rows: list[Result]) -> Result:
    """Return by how much the simulation was off in each measured case, as shares."""
    errors: dict[str, list[float | None]] = {"pipeline": [], "atom": [], "round": []}
    for row in rows:
        for method in ("pipeline", "atom"):
            found = row.get(method)
            share = found["predicted_tokens_per_s"] / found["tokens_per_s"] - 1 if found else None
            errors[method].append(share)
        lasted = row["atom"]["round_s"] if "atom" in row else []
        mean_s = sum(lasted) / len(lasted) if lasted else None
        share = row["atom"]["predicted_round_s"] / mean_s - 1 if mean_s else None
        errors["round"].append(share)
    return {f"{name}_error_share": values for name, values in errors.items()} | {
        f"{name}_worst_error_share": max((abs(v) for v in values if v is not None), default=None)
        for name, values in errors.items()
    }


def _try(errors: list[str], measure: Any) -> Any:
    """Return what is measured; a peer's failure is noted, and costs this one number only."""
    try:
        return measure()
    except PeerError as error:
        errors.append(str(error))
        progress(str(error))
        return None


def _sentence(row: Result) -> str:
    def rate(value: float | None) -> str:
        return "failed" if value is None else f"{format_count(value)} tokens/s"

    link = f"{row['link_bits_per_s'] / 1e6:g} Mbit/s"
    ratio = "" if row["ratio"] is None else f", ratio {row['ratio']:.2f}"
    ratio += "" if row["rounds_finished"] else ", no round finished"
    share = (row.get("atom") or {}).get("share_of_alone")
    alone = "" if share is None else f" ({share:.2f} of as many alone)"
    return (
        f"{link}, {format_seconds(row['round_trip_s'])}: ATOM {rate(row['atom_tokens_per_s'])}"
        f"{alone}, pipeline {rate(row['pipeline_tokens_per_s'])}{ratio}"
    )
