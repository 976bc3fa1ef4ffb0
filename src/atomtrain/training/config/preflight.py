"""Mistakes that can be told before anything heavy is imported: within a tenth of a second.

Everything is checked again where it is used; what is let through here is told a second later. The
folders of runs and peers are checked, made, and taken away if nothing came of them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path

from atomtrain.errors import ConfigError, SwarmError, nearest
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import OBJECTIVES, PREFERENCES

SEPARATOR = "@"
"""Between the run's name and the peer's address in the line that others paste."""
LAN = "lan"
"""In the place of an address: whoever answers on the local network."""
_IP4 = re.compile(r"/ip4/([^/]*)/")


def check_early(options: TrainOptions) -> None:
    """Refuse what cannot be, as far as it can be seen without torch.

    Raises:
        AtomError: the first mistake.
    """
    from atomtrain.engine.devices.device_names import parse_devices

    check_model_name(options.model)
    _check_swarm(options)
    parse_devices(options.device)
    if options.no_profile and options.profile_again:
        raise ConfigError(
            "--no-profile measures nothing, --profile-again anew; leave one of them out"
        )
    _check_numbers(options)
    _check_objective(options)
    _check_folder(options)
    if options.disk is not None and not options.disk.is_dir():
        raise ConfigError(
            f"{options.disk} is not a folder; make it, or name another one for --disk"
        )
    _check_addresses(options)
    if options.data or options.validation is not None:
        from atomtrain.data.weighted import check_sources

        plain = options.objective in (None, OBJECTIVES[0])
        follows = options.resume or options.join
        check_sources(options.data, options.validation, conversations=plain and not follows)
    if options.model is not None and not options.resume and not options.join:
        check_model_place(options.model)


def check_model_place(name: str) -> None:
    """Refuse a model that is neither here nor to be had from the hub.

    Raises:
        ConfigError: says what is missing.
    """
    from atomtrain.models.gpt_config import PRESETS, check_place

    if name in PRESETS or Path(name).suffix == ".json":
        return
    check_place(name)
    if not Path(name).expanduser().is_dir():
        from atomtrain.models.hub_reach import check_in_reach

        check_in_reach(name)


def check_model_name(name: str | None) -> None:
    """Refuse a name that means neither a preset nor a folder, a file or an id."""
    if name is None or "/" in name or Path(name).suffix == ".json" or os.path.exists(name):
        return
    from atomtrain.models.gpt_config import preset

    preset(name)


def _check_swarm(options: TrainOptions) -> None:
    from atomtrain.swarm.packages import require_swarm

    if options.join:
        require_swarm("--join")
    if options.average == "gradient":  # alone nobody would take the step
        require_swarm("--average gradient")
    if options.n_peers > 1:
        require_swarm(f"training with {options.n_peers} peers")


def check_gpu_name(name: str) -> None:
    file = Path(__file__).parents[2] / "planning" / "hardware.json"
    names = list(json.loads(file.read_text(encoding="utf-8"))["gpus"])
    if name.lower() not in names:
        raise ConfigError(
            f"there is no GPU {name!r} in the catalogue.{nearest(name.lower(), names)} "
            f"GPUs: {', '.join(names)}"
        )


def _check_numbers(options: TrainOptions) -> None:
    micro_batch, sequences = options.micro_batch, options.sequences
    if micro_batch is not None and sequences is not None and sequences % micro_batch:
        raise ConfigError(
            f"--micro-batch {micro_batch} does not divide the {sequences} sequences of a step; "
            "give a divisor, or change --sequences"
        )


def _check_objective(options: TrainOptions) -> None:
    """Refuse to compare with a trained model where the model is to start anew."""
    from atomtrain.models.gpt_config import PRESETS

    starts_anew = options.model in PRESETS or (
        options.model is None and not options.resume and not options.join
    )
    if options.objective not in (None, OBJECTIVES[0]) and starts_anew:
        raise ConfigError(
            f"--objective {options.objective} goes on with a trained model; name its folder with "
            "--model"
        )
    if not options.resume and not options.join:
        check_factors(options)


def check_factors(options: TrainOptions) -> None:
    """Refuse factors of a loss that a new run does not have."""
    if options.objective not in PREFERENCES and options.beta is not None:
        raise ConfigError(
            f"--beta belongs to --objective {' or '.join(PREFERENCES)}; give both, or leave it out"
        )
    if options.objective != "simpo" and options.gamma is not None:
        raise ConfigError("--gamma belongs to --objective simpo; give both, or leave it out")


def _check_folder(options: TrainOptions) -> None:
    """Refuse a folder of runs that is a file, and a run that is not there to be resumed."""
    for place in (options.directory, *options.directory.parents):
        if place.exists():
            if not place.is_dir():
                raise ConfigError(
                    f"{options.directory} cannot be made ({place} is a file); choose another "
                    "--directory"
                )
            break
    if options.run is not None and options.n_peers == 1:
        run = options.directory / options.run
        by_itself = resumed_name(run) if options.resume else FIRST_NAME
        check_directory(run / (options.name or by_itself), resume=options.resume)


def entries_of(options: TrainOptions) -> list[str]:
    """Return what was given with `--join`, lists taken apart."""
    return [entry.strip() for pasted in options.join for entry in pasted.split(",")]


def _check_addresses(options: TrainOptions) -> None:
    """Refuse addresses that name no run, and what is not written as an address is."""
    entries = entries_of(options)
    named = options.run is not None or any(SEPARATOR in entry for entry in entries)
    if entries and not named and not any(entry.startswith(LAN) for entry in entries):
        raise SwarmError(
            "which run to join is not clear (no name given); paste the whole line that a peer of "
            "the run prints: atom train --join RUN@ADDRESS"
        )
    for entry in entries:
        address = entry.rpartition(SEPARATOR)[2]
        found = _IP4.match(address)
        if found and not _is_ip4(found[1]):
            raise SwarmError(
                f"{address!r} is not the address of a peer; paste the whole line that a peer "
                "prints, such as /ip4/192.168.1.5/tcp/31337/p2p/12D3Koo..."
            )
        if address != LAN:
            from atomtrain.swarm.transport.addresses import place_of

            place_of(address)


def _is_ip4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


CHECKPOINTS = "checkpoints"
"""The folder of a peer's checkpoints, in the folder of the peer."""
FIRST_NAME = "peer-0"
"""What a peer is called that starts a run."""


def make_directory(directory: Path) -> None:
    """Make the folder of a peer, if it is not there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made ({error.strerror}); choose another --directory"
        ) from error


def unnamed_run(model: str, directory: Path) -> str:
    """Return the name of a run that nobody named: what it trains, and when it begins.

    Another one may have begun in the same second; that is in the folder of runs already.
    """
    name = f"{model}-{time.strftime('%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(each for each in names if not (directory / each).exists())


def check_directory(directory: Path, *, resume: bool) -> None:
    """Refuse a peer's folder that holds a run already, or, to resume, one that holds none.

    Raises:
        ConfigError: says which.
    """
    checkpoints = directory / CHECKPOINTS
    if not resume and checkpoints.is_dir() and any(checkpoints.glob("step-*")):
        raise ConfigError(
            f"{directory} already holds a run; continue it with --run {directory.parent.name} "
            "--resume, or choose another --run name"
        )
    if resume and not checkpoints.is_dir():
        saved = _saved_peers(directory.parent)
        fix = f"give --name {' or '.join(saved)}" if saved else "check --run and --directory"
        raise ConfigError(f"there is no checkpoint in {checkpoints} to resume from; {fix}")


def resumed_name(run: Path) -> str:
    """Return whom to resume in a run's folder if nobody is named: the only one that has saved.

    Who joined a run was given a name, which nobody remembers.
    """
    saved = _saved_peers(run)
    return saved[0] if len(saved) == 1 else FIRST_NAME


def _saved_peers(run: Path) -> list[str]:
    """Return the names of a run's peers that have checkpoints on this machine."""
    return sorted({path.parent.parent.name for path in run.glob(f"*/{CHECKPOINTS}/step-*")})


def remove_empty(directory: Path) -> None:
    """Remove the folder of a peer that never came to be: it holds at most a key nobody knows."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # other peers of the run live there
        directory.parent.rmdir()
