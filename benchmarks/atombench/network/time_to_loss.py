"""Loss against time on slow links: ATOM's local steps, a pipeline, data parallelism.

Tokens per second say nothing of how much is learnt from each. Here all methods start from the same
weights, train on samples of the same text with the same optimizer for the same time, and what
counts is how low the loss is by then, and how long each took to get where the others ended.

Tokens are bytes of the demonstration corpus, drawn at random, far fewer than it has: the loss of a
step is that of samples never seen. Setting is `network`'s otherwise, and so are the methods; the
pipeline is searched for anew on each link. ATOM's loss is the mean of its peers'.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
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
from atombench.links.shaping import Link, Network
from atombench.network.measured import (
    Measured,
    curve_of_atom,
    curve_of_measured,
    demonstration_text,
    smoothed,
)
from atombench.network.methods import Methods
from atombench.network.model import ModelSetup, Speeds
from atombench.network.prediction import way_of
from atombench.network.setup import NetworkSetup, StandsFor, stand_in

_TRAIN_S = 100.0
_QUICK_S = 4.0
_MODEL = ModelSetup(vocabulary=256, learning_rate=1e-3)
_SETUP = NetworkSetup(model=_MODEL, wire="int4", settle_s=0.0, alone_s=0.0, trials=4)
_QUICK = NetworkSetup(
    model=replace(_MODEL, layers=4, width=128, sequence_tokens=16, sequences_per_peer=64),
    wire="int4",
    spare_share=0.6,
    micro_batches=(8,),
    settle_s=0.0,
    alone_s=0.0,
    trials=1,
    trial_s=0.5,
    case_s=8.0,
)


def run(options: BenchmarkOptions) -> Result:
    """Train with every method on each link; `curves` holds loss over seconds and tokens.

    Raises:
        ConfigError: no network namespaces here; says what is needed.
        DataError: the demonstration corpus is not installed.
    """
    setup = _QUICK if options.quick else _SETUP
    train_s = _QUICK_S if options.quick else _TRAIN_S
    if options.peers is not None:
        setup = replace(setup, peers=options.peers)
    curves: list[Result] = []
    with terminable(), tempfile.TemporaryDirectory(prefix="atom-loss-") as folder:
        setup = replace(
            setup,
            model=replace(setup.model, text=demonstration_text(Path(folder))),
            window_s=train_s,
            longest_window_s=train_s,
        )
        with Network(setup.peers) as network:
            for name, link in _links(setup, network, Path(folder), options.quick):
                curves += _curves(name, link, setup, network, Path(folder), train_s)
                keep_partial({"curves": curves, "reached": _reached(curves)}, options.out)
    return {
        "curves": curves,
        "reached": _reached(curves),
        "train_s": train_s,
        "peers": setup.peers,
        "inputs": setup.to_json(),
        **description(),
    }


def _links(
    setup: NetworkSetup, network: Network, folder: Path, quick: bool
) -> list[tuple[str, Link]]:
    """Return slow links by name; one is slowed until it stands for a GPU's."""
    if quick:
        return [("10 Mbit/s", Link(bits_per_s=1e7))]
    with Methods(setup, network, folder) as methods:
        rate = methods.speeds().tokens_per_s(setup.model) * setup.model.flops_per_token
    wanted = StandsFor("rtx-3090", 1e8, "gpt3-xl", 0.03)
    return [
        ("10 Mbit/s", Link(bits_per_s=1e7)),
        (
            "as 100 Mbit/s and 30 ms are to gpt3-xl on an RTX 3090",
            stand_in(setup.model, wanted, rate),
        ),
    ]


def _curves(
    name: str, link: Link, setup: NetworkSetup, network: Network, folder: Path, train_s: float
) -> list[Result]:
    # New peers for each link: every method starts from the same weights.
    with Methods(setup, network, folder) as methods:
        speeds = methods.speeds()
        found = [
            _of_atom(setup, methods.atom.measure(link, speeds)),
            *_of_baselines(setup, methods, link, speeds, network, train_s),
        ]
    rate = speeds.tokens_per_s(setup.model)
    for curve in found:
        curve["utilisation"] = curve["tokens_per_s"] / (setup.peers * rate)
        curve["bits_per_flop"] = (link.bits_per_s or 0.0) / (rate * setup.model.flops_per_token)
        curve["link"], curve["link_bits_per_s"] = name, link.bits_per_s
        curve["round_trip_s"] = link.round_trip_s
        curve["name"] = f"{curve['method']}, {name}"
        progress(
            f"{curve['name']}: loss {curve['loss'][-1]:.3f} after {curve['tokens'][-1]} tokens"
        )
    return found


def _of_atom(setup: NetworkSetup, result: dict[str, Any]) -> Result:
    tokens = setup.step_sequences * setup.model.sequence_tokens
    return {
        "method": "ATOM",
        "rounds_averaged": result["rounds_averaged"],
        "tokens_per_s": result["tokens_per_s"],
        "sent_bytes_per_token": result["sent_bytes_per_token"],
        **curve_of_atom(result, tokens),
    }


def _of_baselines(
    setup: NetworkSetup,
    methods: Methods,
    link: Link,
    speeds: Speeds,
    network: Network,
    train_s: float,
) -> list[Result]:
    network.shape(link)
    way = way_of(link, methods.congestion(link))
    search = methods.search(way, speeds, until_s=math.inf)
    found = [
        {
            "method": "pipeline",
            "pipeline": search.best.name(),
            **_of_measured(
                methods.pipeline(search, train_s), search.sequences * setup.model.sequence_tokens
            ),
        }
    ]
    parallel = methods.data_parallel(link, speeds)
    if isinstance(parallel, str):
        progress(f"data parallel is left out: {parallel}")
    else:
        tokens = setup.step_sequences * setup.model.sequence_tokens
        found.append({"method": "data parallel", **_of_measured(parallel, tokens)})
    network.shape(Link(bits_per_s=None))
    return found


def _of_measured(measured: Measured, tokens_per_step: int) -> Result:
    return {
        "tokens_per_s": measured.tokens_per_s,
        "sent_bytes_per_token": measured.sent_bytes_per_token,
        **curve_of_measured(measured, tokens_per_step),
    }


def _reached(curves: Sequence[Result]) -> list[Result]:
    """Return for each baseline when ATOM was where it ended, and the losses at equal tokens."""
    found = []
    for link in dict.fromkeys(curve["link"] for curve in curves):
        alike = {curve["method"]: curve for curve in curves if curve["link"] == link}
        ours = alike.pop("ATOM")
        smooth = smoothed(ours["loss"])
        for method, theirs in alike.items():
            last = smoothed(theirs["loss"])[-1]
            first = next((i for i, loss in enumerate(smooth) if loss <= last), None)
            tokens = min(ours["tokens"][-1], theirs["tokens"][-1])
            found.append(
                {
                    "link": link,
                    "baseline": method,
                    "baseline_loss": last,
                    "baseline_s": theirs["seconds"][-1],
                    "atom_s": None if first is None else ours["seconds"][first],
                    "atom_loss": smooth[-1],
                    "equal_tokens": tokens,
                    "atom_loss_at_equal_tokens": _at(ours, tokens),
                    "baseline_loss_at_equal_tokens": _at(theirs, tokens),
                }
            )
    return found


def _at(curve: Result, tokens: int) -> float:
    """Return the smoothed loss when so many tokens had been trained on."""
    index = max((i for i, seen in enumerate(curve["tokens"]) if seen <= tokens), default=0)
    return smoothed(curve["loss"])[index]
