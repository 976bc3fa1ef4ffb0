"""What the simulation says of everything that `atom bench network` measured.

Predictions are made again with today's simulation, of nothing but what a result holds that was
measured apart from what is predicted: the times of layers on a core of their own (`speeds`, in
newer results of each row), the number of cores, what the peers train each for itself, and in newer
results what each stage of a pipeline computes without the network (`compute_s`) and the rate of the
link both ways at once (`probe`). So a model that gets better is judged by all runs there are, not
by those that are made with it. What the search for pipelines went by at the time stays in the
result.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from atombench.links.shaping import Link
from atombench.network.model import ModelSetup, Speeds
from atombench.network.panels import Row, link_name
from atombench.network.prediction import predicted_again, way_of
from atomresearch.simulation.link import CUBIC, PAYLOAD_SHARE
from atomresearch.simulation.swarm import SwarmLink, SwarmWork, simulate_swarm

CLOSE = 0.1
"""An error up to which a prediction counts as right, as a share."""


class Case(NamedTuple):
    """One prediction of the simulation beside what was measured."""

    link: str
    what: str
    predicted: float
    each: tuple[float, ...]
    """As measured, each time."""
    knowing: float | None = None
    """What is simulated with the times for which the processors computed in these very
    measurements; `None`: the result does not hold them. It judges the model of network and swarm,
    whatever became of the machine since the calibration."""
    drift_share: float | None = None
    """How much longer the processors took in the measurements than in the calibration before, of
    which `predicted` is made: the machine, not the model. `None`: as for `knowing`."""

    @property
    def measured(self) -> float:
        """The mean of the measurements."""
        return statistics.fmean(self.each)

    @property
    def error_share(self) -> float:
        """How far the prediction was off, of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def knowing_error_share(self) -> float | None:
        """How far `knowing` was off, of what was measured."""
        return None if self.knowing is None else self.knowing / self.measured - 1

    @property
    def counted_error_share(self) -> float:
        """How far the simulation was off with the run's own times; without them, as predicted."""
        known = self.knowing_error_share
        return self.error_share if known is None else known

    @property
    def right(self) -> bool:
        """Whether the simulation is within 10%, by what counts."""
        return abs(self.counted_error_share) <= CLOSE

    @property
    def kind(self) -> str:
        """What was predicted, whatever the link."""
        if self.what.startswith("ATOM"):
            return self.what
        return "our pipelines" if self.what.startswith("own") else "PyTorch's pipelines"


def cases(result: Mapping[str, Any]) -> list[Case]:
    """Return all predictions that were measured: ATOM, its rounds, and every pipeline tried.

    Pipelines are compared by their rates of tokens, rounds by their seconds. Results that do not
    hold `speeds` keep the predictions of their time.
    """
    found = []
    for row in result.get("rows", ()):
        found += [*_of_atom(result, row), *_of_pipelines(result, row)]
    return found


def _of_atom(result: Mapping[str, Any], row: Row) -> Iterator[Case]:
    atom = row.get("atom")
    if not atom:
        return
    # In the same minutes, beside as many others: what the peers train each for itself.
    rate = atom.get("alone_tokens_per_s") or atom["predicted_tokens_per_s"]
    link, measured = link_name(row), (atom["tokens_per_s"],)
    if atom.get("alone_compute_s"):
        drift = atom["compute_s"] / atom["alone_compute_s"]
        yield Case(link, "ATOM, tokens/s", rate, measured, rate / drift, drift - 1)
    else:
        yield Case(link, "ATOM, tokens/s", rate, measured)
    if atom["round_s"]:
        mean_s = (statistics.fmean(atom["round_s"]),)
        if "speeds" not in result:
            yield Case(link, "ATOM, round in s", atom["predicted_round_s"], mean_s)
            return
        # A round waits for a step: here for one as they were meanwhile.
        knowing_s = _round_s(result, row, atom["tokens_per_s"])
        drift = rate / atom["tokens_per_s"]
        predicted_s = _round_s(result, row, rate)
        yield Case(link, "ATOM, round in s", predicted_s, mean_s, knowing_s, drift - 1)


def _round_s(result: Mapping[str, Any], row: Row, tokens_per_s: float) -> float:
    """Return the seconds of a mean round of the fragments that were averaged."""
    atom, way_s = row["atom"], row["round_trip_s"] / 2
    share = result["inputs"]["upload_share"] if row["shaped"] else PAYLOAD_SHARE
    link = SwarmLink(
        bits_per_s=share * row["link_bits_per_s"],
        one_way_s=way_s,
        loss_share=row.get("loss_share", 0.0),
    )
    sent_bytes = atom.get("round_bytes")
    if sent_bytes is None:
        # An older result, which does not say: its round was a step, six ways and these bytes.
        step_s = result["tokens_per_step"] / atom["predicted_tokens_per_s"]
        sent_s = atom["predicted_round_s"] - step_s - 6 * way_s
        sent_bytes = round(sent_s * link.bits_per_s / 8)
    work = SwarmWork(
        step_s=[result["tokens_per_step"] / tokens_per_s] * result["peers"],
        tokens_per_step=result["tokens_per_step"] // result["peers"],
        exchange_bytes=[sent_bytes],
        local_steps=1,
    )
    return simulate_swarm(work, link).round_s


def _of_pipelines(result: Mapping[str, Any], row: Row) -> Iterator[Case]:
    pipeline = row.get("pipeline") or {"trials": [], "step_sequences": 0}
    trials = [trial for trial in pipeline["trials"] if trial["tokens_per_s"]]
    if "speeds" not in result:
        for trial in trials:
            rate = trial["predicted_tokens_per_s"]
            yield Case(link_name(row), trial["pipeline"], rate, _measured(pipeline, trial))
        return
    setup = ModelSetup.from_json({**result["inputs"]["model"], "text": ""})
    told = row.get("speeds", result["speeds"])
    sizes = {int(size): kinds for size, kinds in told["sizes"].items()}
    speeds = Speeds(sizes, told["update_parameters_per_s"])
    link = Link(
        bits_per_s=row["link_bits_per_s"] if row["shaped"] else None,
        round_trip_s=row["round_trip_s"],
        loss_share=row.get("loss_share", 0.0),
    )
    control = row.get("congestion_control") or result.get("congestion_control", CUBIC)
    way = way_of(link, control, row.get("probe"))
    cores = result["machine"]["cores"]
    tokens = pipeline["step_sequences"] * setup.sequence_tokens
    for trial in trials:
        name = trial["pipeline"]

        def rate(compute_s: Sequence[float], name: str = name) -> float:
            step_s = predicted_again(name, setup, result["peers"], speeds, way, cores, compute_s)
            return float(tokens / step_s)

        own = _own_compute_s(pipeline, trial)
        knowing = statistics.fmean(rate(compute_s) for compute_s in own) if own else None
        predicted = rate(trial.get("compute_s", ()))
        drift = None
        if own and trial.get("compute_s"):
            drift = statistics.fmean(map(sum, own)) / sum(trial["compute_s"]) - 1
        measured = _measured(pipeline, trial)
        yield Case(link_name(row), name, predicted, measured, knowing, drift)


def _measured(pipeline: Mapping[str, Any], trial: Mapping[str, Any]) -> tuple[float, ...]:
    """Return all rates of a pipeline: the best one was measured again, before and after ATOM."""
    rates = [trial["tokens_per_s"]]
    if trial["pipeline"] == pipeline.get("pipeline"):
        # A trial that was long enough is the first of the two.
        rates += [rate for rate in pipeline["tokens_per_s_of_both"] if rate not in rates]
    return tuple(rates)


def _own_compute_s(pipeline: Mapping[str, Any], trial: Mapping[str, Any]) -> list[Sequence[float]]:
    """Return for how long each stage computed in each of these measurements; older: nothing."""
    if "own_compute_s" not in trial:
        return []
    found = [trial["own_compute_s"]]
    if trial["pipeline"] == pipeline["pipeline"]:
        found += [each for each in pipeline["own_compute_s_of_both"] if each not in found]
    return found
