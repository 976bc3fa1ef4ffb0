"""`atom swarm` looks at a swarm from outside; `atom identity` makes and shows who takes part."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomtrain.cli.parsing import leaving_at_once, parse, shown
from atomtrain.errors import ConfigError, SwarmError, nearest
from atomtrain.settings import option
from atomtrain.swarm.packages import require_swarm
from atomtrain.units import counted, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from atomtrain.swarm import SwarmConfig
    from atomtrain.swarm.node.probe import Diagnosis


_COMMANDS = {
    "status": "peers, versions and speed of a swarm, and who reduces what",
    "ping": "find out, step by step, why two machines do or do not see each other",
}
_USAGE = """usage: atom swarm COMMAND [options]

Look at a swarm from outside.

commands:
{commands}

examples:
  atom swarm status mine@/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo...
  atom swarm status runs/mine --json
  atom swarm ping mine@/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo...
"""
_KEY = option(None, "File with the run's key, if it has one.", "FILE")
_IDENTITY = option(
    None, "File with a key whose id the peers allow. Default: a new one each time.", "FILE"
)


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    target: str = option(
        None, "RUN@ADDRESS of a peer (several with commas), or the folder of a run.", "TARGET"
    )
    run_key: Path | None = _KEY
    identity: Path | None = _IDENTITY
    json: bool = option(False, "Print exactly one JSON object instead of a table.")


@dataclass(frozen=True, kw_only=True)
class PingOptions:
    address: str = option(
        None, "RUN@ADDRESS, as the peer prints it (several with commas: up to one that answers).",
        "ADDRESS",
    )  # fmt: skip
    run_key: Path | None = _KEY
    identity: Path | None = _IDENTITY
    json: bool = option(False, "Print exactly one JSON object instead of lines.")


def run_swarm(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:<8} {about}" for name, about in _COMMANDS.items())
        sys.stdout.write(_USAGE.format(commands=commands))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in _COMMANDS:
        raise ConfigError(
            f"there is no command 'swarm {name}'.{nearest(name, _COMMANDS)} "
            f"Commands: {', '.join(_COMMANDS)}"
        )
    require_swarm(f"'atom swarm {name}'")
    return _status(rest) if name == "status" else _ping(rest)


def _status(arguments: Sequence[str]) -> int:
    options = parse(
        StatusOptions, arguments, prog="atom swarm status",
        about="Say who trains a run, how fast and how far, and who reduces what.",
        examples="  atom swarm status runs/mine", positional=("target",),
    )  # fmt: skip
    run_name, addresses = _target(options.target)
    config = outside_config(run_name, options.run_key, options.identity)
    with leaving_at_once():
        from atomtrain.swarm.transport.libp2p import import_hivemind

        import_hivemind()

    status = asyncio.run(_ask_any(config, addresses))
    try:
        text = json.dumps(status) if options.json else _table(status)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SwarmError(f"the status that the peer sent cannot be read: {error!r}") from error
    sys.stdout.write(shown(text) + "\n")
    return 0


def _ping(arguments: Sequence[str]) -> int:
    options = parse(
        PingOptions, arguments, prog="atom swarm ping",
        about="Go the way to a peer step by step, and say what is wrong where it ends.",
        examples="  atom swarm ping mine@/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo...",
        positional=("address",),
    )  # fmt: skip
    run_name, addresses = pasted_addresses(options.address)
    from atomtrain.swarm.node.probe import diagnose

    config = outside_config(run_name, options.run_key, options.identity)
    with leaving_at_once():
        from atomtrain.swarm.transport.libp2p import import_hivemind

        import_hivemind()

    failed: list[Diagnosis] = []
    for address in addresses:
        found = asyncio.run(diagnose(config, address))
        if not options.json:
            about = f"{address}:\n" if len(addresses) > 1 else ""
            sys.stdout.write(shown(about + _lines(found)))
        if found.reached:
            break
        failed.append(found)
    if options.json:
        others = [asdict(one) for one in failed if one is not found]
        result = {**asdict(found), "reached": found.reached, "failed": others}
        sys.stdout.write(json.dumps(result) + "\n")
    return 0 if found.reached else 1


def _target(target: str) -> tuple[str, tuple[str, ...]]:
    """Return run and addresses of what the user named."""
    folder = Path(target)
    if "@" in target and not folder.is_dir():
        return pasted_addresses(target)
    from atomtrain.swarm.membership.known_peers import PEERS_FILE, read_known

    for path in (folder / PEERS_FILE, folder.parent / PEERS_FILE):
        run_name = path.absolute().parent.name
        known = read_known(run_name, path)
        if known:
            return run_name, tuple(a for peer in known.values() for a in peer.addresses)
    if folder.is_dir():
        raise ConfigError(
            f"{folder} holds no list of peers ({PEERS_FILE}); give the folder of a run that other "
            "peers can join, such as runs/NAME, or RUN@ADDRESS"
        )
    raise ConfigError(f"{target!r} is neither RUN@ADDRESS nor a folder; check it")


def pasted_addresses(text: str) -> tuple[str, tuple[str, ...]]:
    """Return run and addresses in what a user pasted, `RUN@ADDRESS` or several with commas.

    Raises:
        SwarmError: one is not an address of a peer, or there is not one run.
    """
    from atomtrain.swarm.transport.addresses import place_of

    named = [entry.strip().rpartition("@") for entry in text.split(",")]
    runs = {run_name for run_name, _, _ in named if run_name}
    for _, _, address in named:
        place_of(address)
    if len(runs) != 1:
        raise SwarmError(
            f"{text!r} names {len(runs)} runs; paste the whole line that a peer prints: RUN@ADDRESS"
        )
    return runs.pop(), tuple(address for _, _, address in named)


def outside_config(run_name: str, key: Path | None, identity: Path | None) -> SwarmConfig:
    """Return the configuration of somebody who looks at a swarm and is not a member.

    Raises:
        ConfigError: the files with key or identity cannot be used.
    """
    from atomtrain.swarm import Endpoint, SwarmConfig
    from atomtrain.swarm.membership.config import admission_of

    if identity is not None and not identity.exists():
        raise ConfigError(f"there is no key {identity}; make one with 'atom identity {identity}'")
    endpoint = Endpoint(listen_host="127.0.0.1", identity_path=identity, connect_s=6.0)
    config = SwarmConfig(run=run_name, endpoint=endpoint, key_path=key, discoverable=False)
    admission_of(config, "")  # mistakes in its files are told first
    return config


async def _ask_any(config: SwarmConfig, addresses: Sequence[str]) -> dict[str, Any]:
    from atomtrain.errors import BadMessage
    from atomtrain.swarm.node.probe import probing
    from atomtrain.swarm.transport.transport import LinkLost

    reasons = {}
    async with probing(config) as probe:
        for address in addresses:
            try:
                return await probe.status(address)
            except (LinkLost, BadMessage) as error:
                reasons[address] = str(error)
    listed = "; ".join(f"{address}: {why}" for address, why in list(reasons.items())[:3])
    raise SwarmError(
        f"no peer of run {config.run!r} answered ({listed}); 'atom swarm ping RUN@ADDRESS' says why"
    )


def _table(status: dict[str, Any]) -> str:
    peers, rounds = status["peers"], status["rounds"]
    names = {peer["peer_id"]: peer["name"] for peer in peers}
    speed = sum(p["tokens_per_s"] for p in peers if p["state"] == "training")
    versions = [version for version in status["versions"] if version is not None]
    low, high = (min(versions), max(versions)) if versions else (None, None)
    span = "no versions" if low is None else f"version {low}"
    span = span if low == high else f"versions {low} to {high}"
    lines = [
        f"run {status['run']}: {counted(len(peers), 'peer')}, {format_count(speed)} tokens/s; "
        f"{format_count(status['parameters'])} parameters in "
        f"{counted(status['fragments'], 'fragment')}, {span}; next round {status['next_round']}",
        f"{'peer':<20} {'state':<9} {'steps':>7} {'tokens':>8} {'tokens/s':>9} {'step':>8} "
        f"{'behind':>6} {'link free':>11} {'reached':>8}  address",
    ]
    for peer in peers:
        state = peer["state"] if peer["reachable"] else "silent"
        free = format_bytes(peer["free_bytes_per_s"]) + "/s" if peer["free_bytes_per_s"] else "-"
        lines.append(
            f"{peer['name'][:20]:<20} {state:<9} {peer['steps']:>7} "
            f"{format_count(peer['tokens']):>8} {format_count(peer['tokens_per_s']):>9} "
            f"{format_seconds(peer['step_s']):>8} {peer['behind']:>6} {free:>11} "
            f"{'relayed' if peer['relays'] else 'direct':>8}  "
            f"{' '.join(peer['addresses'])}"
        )
    relaying = status["relaying"]
    if relaying["peers"]:
        who = ", ".join(names.get(peer_id, peer_id[-8:]) for peer_id in relaying["peers"])
        lines.append(
            f"{names.get(status['asked'], status['asked'][-8:])} relays for {who}: "
            f"{relaying['streams']} streams now, {format_bytes(relaying['passed_bytes'])} so far"
        )
    for entry in rounds:
        when = "now" if entry["under_way"] else "last"
        shares = ", ".join(
            f"{names.get(r['peer_id'], r['peer_id'][-8:])} "
            f"({_slices(r['first_slice'], r['slices'])})"
            for r in entry["reduces"]
        )
        lines.append(
            f"{when}: round {entry['round']}, fragment {entry['fragment']}, reduced by {shares}"
        )
    return "\n".join(lines)


def _slices(first: int, count: int) -> str:
    return f"slice {first}" if count == 1 else f"slices {first} to {first + count - 1}"


def _lines(found: Diagnosis) -> str:
    lines = []
    for step in found.steps:
        lines.append(f"{'ok  ' if step.good else 'FAIL'} {step.name:<11} {step.detail}")
        if step.fix:
            lines.append(f"     {'':<11} -> {step.fix}")
    if found.round_trip_s is not None and found.bytes_per_s is not None:
        lines.append(f"ok   round trip  {format_seconds(found.round_trip_s)}")
        rate = format_bytes(found.bytes_per_s)
        lines.append(f"ok   rate        {rate}/s with one stream, from there to here")
    return "\n".join(lines) + "\n"


_IDENTITY_EXAMPLES = """\
  atom identity mine.key                        makes the key if it is not there; prints the id
  atom identity runs/mine/peer-0                the id of a peer that has run before
  atom train --join ... --identity mine.key     takes part under this id
  atom identity --new-run-key team.key          makes a secret that no one can guess
  atom train --run mine --run-key team.key      only peers with the same file take part"""
_KEY_NAME = "identity.key"


@dataclass(frozen=True, kw_only=True)
class IdentityOptions:
    path: Path = option(None, "File of the key, or the folder of a peer.", "FILE")
    new_run_key: bool = option(
        False, "Write to FILE a new secret for --run-key; it must not be there yet."
    )
    json: bool = option(False, "Print exactly one JSON object instead of the id.")


def run_identity(arguments: Sequence[str]) -> int:
    options = parse(
        IdentityOptions,
        arguments,
        prog="atom identity",
        about="Print a peer's id, for others' --allow lists; make the key if there is none. "
        "Or make the secret of a run.",
        examples=_IDENTITY_EXAMPLES,
        positional=("path",),
    )
    require_swarm("'atom identity'")
    if options.new_run_key:
        return _new_run_key(options)
    from atomtrain.swarm.transport.identity import Identity

    path = options.path / _KEY_NAME if options.path.is_dir() else options.path
    made = not path.exists()
    identity = Identity.load_or_create(path)
    if options.json:
        result = {"peer_id": identity.peer_id, "path": str(path), "created": made}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        if made:
            sys.stderr.write(f"made {path}; keep it: whoever has it is this peer\n")
        sys.stdout.write(f"{identity.peer_id}\n")
    return 0


def _new_run_key(options: IdentityOptions) -> int:
    from atomtrain.swarm.membership.admission import make_secret

    make_secret(options.path)
    if options.json:
        sys.stdout.write(json.dumps({"path": str(options.path), "created": True}) + "\n")
    else:
        sys.stderr.write(
            "whoever has this file can take part in the run: copy it to the other peers over a "
            "channel that you trust, and give each --run-key FILE\n"
        )
        sys.stdout.write(f"{options.path}\n")
    return 0
