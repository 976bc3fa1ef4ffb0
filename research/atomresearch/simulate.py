"""`atom simulate`: what many peers would reach on links that are not there, and what a pipeline."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atomresearch.simulate_options import LINKS, OPTIMIZER, SimulateOptions
from atomtrain.cli.parsing import leaving_at_once, parse
from atomtrain.settings import memory_of
from atomtrain.units import format_bytes, format_count, format_seconds, parse_rate

if TYPE_CHECKING:
    from atomresearch.simulation.compare import Comparison, Site
    from atomtrain.planning.plan.machine import Machine
    from atomtrain.planning.search.batch_search import Compute, Prospect
    from atomtrain.views.plans.subject import MeasureUpdates

_EXAMPLES = """\
  atom simulate gpt3-xl --gpu rtx-3090 --peers 8
  atom simulate gpt3-13b --gpu rtx-4090 --peers 64 --link 100Mbit/s --round-trip 0.05
  atom simulate gpt3-6.7b --gpu a100-40gb --peers 1000 --precision bf16 --json
  atom simulate gpt3-xl --peers 10000 --link 100Mbit/s --wire int4 --rounds 1000
  atom simulate tiny --here --peers 4 --link 10Mbit/s"""


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        SimulateOptions,
        arguments,
        prog="atom simulate",
        about="Say what peers on given links would reach, with ATOM and as a pipeline.",
        examples=_EXAMPLES,
        positional=("model",),
    )
    rates = [parse_rate(text, "--link") * 8 for text in options.link or LINKS]
    with leaving_at_once():
        from atomresearch.simulate_fleet import fleet_rows, fleet_text
        from atomresearch.simulation.compare import compare
        from atomresearch.simulation.site import site_of

    found = prospect_of(options)
    site = site_of(found, options.peers, options.local_steps, options.wire)
    # Whatever is sent is received, so the slower of the two ways decides.
    out = parse_rate(options.upload, "--upload") * 8 if options.upload else math.inf
    results = [compare(site, min(rate, out), options.round_trip) for rate in rates]
    fleets = fleet_rows(options, found, rates) if options.rounds else []
    if options.json:
        report = _to_json(options, found, site, rates, results) | {"fleet": fleets}
        sys.stdout.write(json.dumps(report, allow_nan=False))
    else:
        sys.stdout.write(_text(options, found, site, rates, results))
        if fleets:
            sys.stdout.write("\n\n" + fleet_text(options, fleets))
    sys.stdout.write("\n")
    return 0


def prospect_of(options: SimulateOptions) -> Prospect:
    """Return the plan of one peer, as `atom plan` makes it."""
    from atomtrain.planning.search.batch_search import Workload, prospect
    from atomtrain.training.config.optimizing import named_optimizer, precision_of
    from atomtrain.views.plans.subject import subject

    machine, compute, updates = _place(options)
    precision = options.precision
    model = subject(options.model, options.context).trained_with(
        lambda owned: named_optimizer(owned, OPTIMIZER, precision),
        precision_of(precision),
        measure=updates,
    )
    workload = Workload(
        context_tokens=model.context_tokens, tokens_per_step=options.tokens_per_step
    )
    analyse = functools.partial(model.analyse, on_gpu=compute.on_gpu)
    return prospect(analyse, compute, machine, workload)


def _place(options: SimulateOptions) -> tuple[Machine, Compute, MeasureUpdates | None]:
    """Return a peer's machine, how fast it computes, and what measures its optimizer."""
    from atomtrain.planning.catalogue import gpu, host, machine_for
    from atomtrain.planning.plan.machine import load_machine
    from atomtrain.views.plans.subject import compute_of, this_place

    budgets = memory_of(options)
    if options.here:
        place = this_place(budgets.get("device_memory_bytes"), options.precision)
        assert place.local is not None
        return replace(place.machine, **budgets), place.local, place.updates
    card = gpu(options.gpu)
    if options.machine is not None:
        machine = load_machine(options.machine)
    else:
        usual_bytes = host(card.host).most_memory_bytes
        machine = machine_for(card, budgets.get("host_memory_bytes", usual_bytes))
    return replace(machine, **budgets), compute_of(card, options.precision), None


def _to_json(
    options: SimulateOptions,
    found: Prospect,
    site: Site,
    rates: Sequence[float],
    results: Sequence[Comparison],
) -> dict[str, Any]:
    return {
        "model": options.model,
        "gpu": None if options.here else options.gpu,
        "machine": found.machine.name,
        "peers": site.peers,
        "round_trip_s": options.round_trip,
        "parameters": found.analysis.parameters,
        "tokens_per_step": site.tokens_per_step,
        "step_s": site.step_s,
        "local_steps": site.local_steps,
        "precision": options.precision,
        "wire": options.wire,
        "rows": [
            {
                "link_bits_per_s": rate,
                "upload_bits_per_s": result.bits_per_s,
                "round_trip_s": result.round_trip_s,
                "atom_tokens_per_s": result.atom.tokens_per_s,
                "pipeline_tokens_per_s": result.pipeline and result.pipeline.tokens_per_s,
                "ratio": result.ratio,
                "atom": result.atom._asdict(),
                "pipeline": result.pipeline and result.pipeline._asdict(),
            }
            for rate, result in zip(rates, results, strict=True)
        ],
    }


def _source(options: SimulateOptions) -> str:
    if options.here:
        return "this machine as it was measured"
    return "data sheets" if options.machine is None else f"data sheets and {options.machine}"


def _text(
    options: SimulateOptions,
    found: Prospect,
    site: Site,
    rates: Sequence[float],
    results: Sequence[Comparison],
) -> str:
    lines = [
        f"{options.model} ({format_count(found.analysis.parameters)} parameters) on {site.peers} "
        f"peers with {found.machine.name}, {options.precision}, round trip "
        f"{format_seconds(options.round_trip)}",
        *([f"at most {options.upload} out of each peer"] if options.upload else []),
        f"ATOM: {format_count(site.tokens_per_step)} tokens a peer and step, "
        f"{format_seconds(site.step_s)}; the model averaged once in {site.local_steps} steps",
        "",
        f"{'link':>11}  {'ATOM':>10}  {'model averaged every':>26}  {'pipeline':>10}  {'ratio':>6}"
        "  best pipeline",
    ]
    for rate, result in zip(rates, results, strict=True):
        every = (
            f"{format_seconds(result.atom.averaged_every_s)}, "
            f"{format_count(result.atom.averaged_every_tokens)} tok"
        )
        pipeline = result.pipeline
        others = "-" if pipeline is None else f"{format_count(pipeline.tokens_per_s)}/s"
        ratio = "-" if result.ratio is None else f"{result.ratio:.2f}"
        how = (
            "does not fit the devices"
            if pipeline is None
            else f"{pipeline.pipelines} x {pipeline.stages} stages, {pipeline.in_flight} in "
            f"flight, {pipeline.wire}{', recomputing' if pipeline.recompute else ''}, "
            f"{format_bytes(pipeline.device_bytes)}"
        )
        lines.append(
            f"{rate / 1e6:>5g} Mbit/s  {format_count(result.atom.tokens_per_s):>8}/s"
            f"  {every:>26}  {others:>10}  {ratio:>6}  {how}"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"Simulated, not measured: figures of {_source(options)}, and steps that nothing which "
            "peers do for the network slows down. Tokens per second say nothing of how well peers "
            "learn that average less often.",
        ]
    )
