"""ATOM against a pipeline and against data parallelism, on links from fast to very slow.

Real processes, each in a network namespace, joined by links of given rate and round trip
(`shaping`). All methods train the same model with the same optimizer on as many tokens a step, on
the same cores: each peer has one thread and, with as many cores as peers, a core of its own that
its helpers share. Tokens per second are those of all peers together.

- *ATOM*: each peer swaps the whole model through an emulated device; the swarm averages fragments
  in the background. The emulated link to the host has as many bytes for each FLOP of this processor
  as the named GPU's has, so swapping is not made easier than it is there.
- *Pipeline*: the model is cut into stages that stay on devices of at least as much memory, without
  swapping. For each link the best of many configurations is searched (`search`), then
  measured before and after ATOM; the faster of the two counts.
- *Data parallel*: every peer holds everything (more than the budget) and averages float32 gradients
  in every step with PyTorch's `DistributedDataParallel`, which overlaps the last backward.
- *Swapped data parallel*: the same of ATOM's engine, within the budget (`SwappedParallel`).

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
from functools import partial
from pathlib import Path
from typing import Any

from atombench.common import (
    BenchmarkOptions,
    Result,
    description,
    keep_partial,
    progress,
    terminable,
)
from atombench.links.peers import PeerError
from atombench.links.shaping import Network, congestion_control
from atombench.network.atom_method import LOSSES_OF_PEERS
from atombench.network.measured import (
    Measured,
    curve_of_atom,
    curve_of_measured,
    demonstration_text,
)
from atombench.network.methods import Methods
from atombench.network.model import Speeds
from atombench.network.panels import largest_ratio, link_name, rounds_finished
from atombench.network.prediction import way_of
from atombench.network.setup import (
    ALONE_LINKS,
    QUICK,
    UNSHAPED_BITS_PER_S,
    NetworkSetup,
    WantedLink,
    parse_links,
    wanted_links,
)
from atomresearch.simulation.link import PipelineLink
from atomtrain.errors import DataError
from atomtrain.units import format_count

_LEARNING_RATE = 1e-3
"""For text; of random tokens nothing can be learnt."""
_NOT_ASKED = "not asked for"
_ALONE_TIMES, _ALONE_TURNS = 2.0, 5
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
    if options.link:
        links, stand_ins = parse_links(options.link)
        alone = options.links == "alone"
        setup = replace(setup, links=links, stand_ins=stand_ins, baselines=not alone)
    elif options.links == "plain":
        setup = replace(setup, stand_ins=())
    elif options.links == "stand-ins":
        # The quick setup has none of its own.
        stand_ins = setup.stand_ins or NetworkSetup().stand_ins[:1]
        setup = replace(setup, links=(), stand_ins=stand_ins)
    elif options.links == "alone":
        setup = replace(setup, links=ALONE_LINKS, stand_ins=(), baselines=False)
    if options.links == "alone":
        # All there is to tell are two rates a few percent apart, on cores that are not steadier.
        window_s, alone_s = (_ALONE_TIMES * each for each in (setup.window_s, setup.alone_s))
        turns = 1 if options.quick else _ALONE_TURNS
        setup = replace(setup, window_s=window_s, alone_s=alone_s, turns=turns)
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
        terminable(),
        tempfile.TemporaryDirectory(prefix="atom-network-") as folder,
        Network(setup.peers) as network,
        Methods(_learning(setup, Path(folder)), network, Path(folder)) as methods,
    ):
        setup = methods.setup
        speeds = methods.speeds()
        flops_per_s = speeds.tokens_per_s(setup.model) * setup.model.flops_per_token
        progress(f"a peer computes {flops_per_s / 1e9:.1f} GFLOP/s")
        wanted = wanted_links(setup, flops_per_s)
        for each in wanted:
            if rows and time.monotonic() - started_s > setup.total_s:
                break
            rows.append(_row(each, setup, methods, speeds, flops_per_s))
            progress(f"{time.monotonic() - started_s:4.0f} s: {_sentence(rows[-1])}")
            result = {
                "rows": rows,
                "load_average_before": load,
                "links_left_out": len(wanted) - len(rows),
                "largest_ratio": largest_ratio(rows),
                "simulation": _simulation(rows),
                "asked": {"links": options.links, "link": list(options.link)},
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
        "congestion_control": congestion_control(),
        "boundary_bits_per_flop": setup.model.boundary_bits_per_flop,
        "plan": methods.atom.plan,
        "micro_batch_step_s": {str(k): v for k, v in methods.atom.micro_batches.items()},
        "inputs": setup.to_json(),
        **description(),
    }


def _row(
    wanted: WantedLink, setup: NetworkSetup, methods: Methods, speeds: Speeds, flops_per_s: float
) -> Result:
    """Measure one link with every method; what fails is named and leaves `None`."""
    rate = wanted.link.bits_per_s or UNSHAPED_BITS_PER_S
    row: Result = {
        "link_bits_per_s": rate,
        "shaped": wanted.link.bits_per_s is not None,
        "round_trip_s": wanted.link.round_trip_s,
        "loss_share": wanted.link.loss_share,
        "bits_per_flop": rate / flops_per_s,
        "stands_for": wanted.stands_for._asdict() if wanted.stands_for else None,
    }
    errors: list[str] = []
    lately = speeds
    if setup.baselines:
        # Machines are not equally fast all the time: what the search goes by is of these minutes.
        lately = _try(errors, methods.speeds) or speeds
        row["speeds"] = lately._asdict()
    bound = setup.peers * speeds.tokens_per_s(setup.model)
    methods.network.shape(wanted.link)
    control = _try(errors, lambda: methods.congestion(wanted.link)) or congestion_control()
    row["congestion_control"] = control
    _try(errors, lambda: row.update({"probe": methods.probe(wanted.link)}))
    # Not by the probe, which is short: the search is to leave out no pipeline for a hiccup.
    way = way_of(wanted.link, control)
    tokens_per_step = setup.step_sequences * setup.model.sequence_tokens
    with_others = setup.baselines
    before = _try(errors, lambda: _pipeline(way, setup, methods, lately)) if with_others else None
    atom = _try(errors, lambda: methods.atom.measure(wanted.link, speeds))
    methods.network.shape(wanted.link)
    if before is not None:
        after = _try(errors, lambda: methods.pipeline(before["search"], setup.window_s))
        tokens = before["search"].sequences * setup.model.sequence_tokens
        row["pipeline"] = _pipeline_result(before, after, tokens, bound)
    for name, measure in (
        ("data_parallel", methods.data_parallel),
        ("swapped_parallel", methods.swapped_parallel),
    ):
        found = _try(errors, partial(measure, wanted.link, speeds)) if with_others else _NOT_ASKED
        row[f"{name}_tokens_per_s"] = None
        if isinstance(found, str):
            row[name] = {"left_out": found}
        elif found is not None:
            row[f"{name}_tokens_per_s"] = found.tokens_per_s
            row[name] = _plain(found, tokens_per_step, bound)
    if atom is not None:
        learnt = curve_of_atom(atom, tokens_per_step)
        del atom[LOSSES_OF_PEERS]
        row["atom"] = {**atom, "utilisation": atom["tokens_per_s"] / bound, "curve": learnt}
    ours = atom["tokens_per_s"] if atom else None
    theirs = row["pipeline"]["tokens_per_s"] if before else None
    row["atom_tokens_per_s"], row["pipeline_tokens_per_s"] = ours, theirs
    row["ratio"] = ours / theirs if ours and theirs else None
    row["full_step_ratio"] = _full_step_ratio(row, setup)
    row["rounds_finished"] = rounds_finished(row)
    row["errors"] = errors
    return row


def _full_step_ratio(row: Result, setup: NetworkSetup) -> float | None:
    """Return the ratio to the pipeline that was too slow to be run with all of a step's tokens.

    `None`: it was not too slow, or there is no ratio. Its rate is simulated.
    """
    found = row.get("pipeline", {})
    if row["ratio"] is None or found["step_sequences"] == setup.step_sequences:
        return None
    return float(row["atom_tokens_per_s"] / found["full_step_tokens_per_s"])


def _pipeline(
    way: PipelineLink, setup: NetworkSetup, methods: Methods, speeds: Speeds
) -> dict[str, Any]:
    search = methods.search(way, speeds, time.monotonic() + setup.case_s / 2)
    measured = search.measured
    if measured.elapsed_s < setup.window_s:  # else the trial was as long as a measurement
        measured = methods.pipeline(search, setup.window_s)
    return {
        "search": search,
        "device_peak_bytes": methods.pipeline_memory(search),
        "measured": measured,
    }


def _pipeline_result(
    found: dict[str, Any], after: Measured | None, tokens_per_step: int, bound: float
) -> Result:
    search, both = found["search"], [found["measured"], *([after] if after else [])]
    fastest = max(both, key=lambda measured: measured.tokens_per_s)
    return {
        **_plain(fastest, tokens_per_step, bound),
        "tokens_per_s_of_both": [measured.tokens_per_s for measured in both],
        "own_compute_s_of_both": [measured.compute_s for measured in both],
        "pipeline": search.best.name(),
        "step_sequences": search.sequences,
        "predicted_tokens_per_s": search.predicted_tokens_per_s,
        "full_step_tokens_per_s": search.full_step_tokens_per_s,
        "considered": search.considered,
        "trials": search.trials,
        "device_peak_bytes": found["device_peak_bytes"],
    }


def _plain(measured: Measured, tokens_per_step: int, bound: float) -> Result:
    return {
        **measured.plain(),
        "utilisation": measured.tokens_per_s / bound,
        "curve": curve_of_measured(measured, tokens_per_step),
    }


def _learning(setup: NetworkSetup, folder: Path) -> NetworkSetup:
    """Return the set-up with text to learn from, if there is some and the model can hold it."""
    if setup.model.vocabulary < 256:
        return setup
    try:
        text = demonstration_text(folder)
    except DataError as error:
        progress(f"tokens are random, so no loss will fall: {error}")
        return setup
    return replace(setup, model=replace(setup.model, text=text, learning_rate=_LEARNING_RATE))


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

    ratio = "" if row["ratio"] is None else f", ratio {row['ratio']:.2f}"
    ratio += "" if row["rounds_finished"] else ", no round finished"
    atom = row.get("atom") or {}
    share, turns = atom.get("share_of_alone"), len(atom.get("shares_of_alone", []))
    middle = f", the middle one of {turns}" if turns > 1 else ""
    alone = "" if share is None else f" ({share:.2f} of as many alone{middle})"
    asked = (row.get("data_parallel") or {}).get("left_out") != _NOT_ASKED
    pipeline = f", pipeline {rate(row['pipeline_tokens_per_s'])}" if asked else ""
    return f"{link_name(row)}: ATOM {rate(row['atom_tokens_per_s'])}{alone}{pipeline}{ratio}"
