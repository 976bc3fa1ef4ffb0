"""`atom identity`: show a peer's id, and make its key if it has none; make the secret of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomtrain.cli.parsing import parse
from atomtrain.settings import option
from atomtrain.swarm.packages import require_swarm

_EXAMPLES = """\
  atom identity mine.key                        makes the key if it is not there; prints the id
  atom identity runs/mine/peer-0                the id of a peer that has run before
  atom train --join ... --identity mine.key     takes part under this id
  atom identity --new-run-key team.key          makes a secret that no one can guess
  atom train --run mine --run-key team.key      only peers with the same file take part"""
_KEY_NAME = "identity.key"


@dataclass(frozen=True, kw_only=True)
class IdentityOptions:
    """What a user can say to `atom identity`."""

    path: Path = option(None, "File of the key, or the folder of a peer.", "FILE")
    new_run_key: bool = option(
        False, "Write to FILE a new secret for --run-key; it must not be there yet."
    )
    json: bool = option(False, "Print exactly one JSON object instead of the id.")


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        IdentityOptions,
        arguments,
        prog="atom identity",
        about="Print a peer's id, for others' --allow lists; make the key if there is none. "
        "Or make the secret of a run.",
        examples=_EXAMPLES,
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
