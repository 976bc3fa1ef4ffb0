"""A run to look at: `atom dashboard` in the browser, `atom watch` in the terminal."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atomtrain.cli.parsing import parse
from atomtrain.errors import ConfigError
from atomtrain.settings import check_port, option

if TYPE_CHECKING:
    from atomtrain.views.dashboard.source import Source


_DASHBOARD_EXAMPLES = """\
  atom dashboard runs/mine                 all peers of a run on this machine
  atom dashboard runs/mine/peer-0          one of them, and the swarm as it sees it
  atom dashboard runs/a runs/b             several runs side by side; or a folder of runs
  atom dashboard runs/mine --public        a page for anybody: no addresses, paths or messages
  atom dashboard mine@/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo...   a swarm, through any peer
  atom dashboard runs/mine --host 0.0.0.0  for other machines too; prints an address with a token"""
_LOCAL = frozenset(("127.0.0.1", "localhost", "::1"))


@dataclass(frozen=True, kw_only=True)
class DashboardOptions:
    target: tuple[str, ...] = option(
        None,
        "Folders of runs or of peers, a folder of runs, or RUN@ADDRESS of any peer of a swarm.",
        "TARGET",
    )
    public: bool = option(
        False,
        "Show what anybody may see, without a token: loss, who contributed, samples; no address, "
        "path or message is sent.",
    )
    host: str = option(
        "127.0.0.1", "IP address to listen on. Beyond this machine a token is asked for.", "IP"
    )
    port: int = option(8686, "TCP port to listen on; 0 is any free one.", "N")
    run_key: Path | None = option(
        None, "With an address: file with the run's key, if it has one.", "FILE"
    )
    token: str | None = option(
        None, "Token that visitors must know. Default: a random one, beyond this machine.", "TEXT"
    )

    def __post_init__(self) -> None:
        check_port("--port", self.port)
        try:
            ipaddress.ip_address(self.host)
        except ValueError as error:
            raise ConfigError(
                f"--host {self.host!r} is no IP address; give 127.0.0.1 or 0.0.0.0"
            ) from error
        if self.token is not None and not (8 <= len(self.token) <= 256 and self.token.isalnum()):
            raise ConfigError("--token must be 8 to 256 letters and digits")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the page."""
        return ipaddress.ip_address(self.host).is_loopback


def run_dashboard(arguments: Sequence[str]) -> int:
    options = parse(
        DashboardOptions,
        arguments,
        prog="atom dashboard",
        about="Show a run in the browser: loss, speed, timeline, memory, swarm and plan.",
        examples=_DASHBOARD_EXAMPLES,
        positional=("target",),
    )
    from atomtrain.views.dashboard.server import application, missing_extra

    source = _source(options)
    is_open = options.is_local or options.public
    token = options.token or (None if is_open else secrets.token_hex(16))
    hosts = frozenset((*_LOCAL, options.host)) if options.is_local else None
    page = "public.html" if options.public else "index.html"
    app = application(source, token=token, hosts=hosts, page=page)
    try:
        import uvicorn
    except ImportError as error:
        raise missing_extra(error) from error

    with _listening(options) as listener:
        source.poll()
        port = listener.getsockname()[1]
        shown = options.host if options.is_local else socket.gethostname()
        sys.stdout.write(f"dashboard: http://{shown}:{port}/{f'?token={token}' if token else ''}\n")
        sys.stdout.flush()
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=1
        )
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _source(options: DashboardOptions) -> Source:
    from atomtrain.views.dashboard.public import PublicSource

    source = _whole_source(options)
    return PublicSource(source) if options.public else source


def _whole_source(options: DashboardOptions) -> Source:
    from atomtrain.views.dashboard.source import source_of

    addresses = [target for target in options.target if "@" in target and not Path(target).is_dir()]
    if not addresses:
        return source_of([Path(target) for target in options.target])
    if len(options.target) > 1:
        raise ConfigError(
            f"{addresses[0]} is the address of a swarm, which is shown alone; give one address, or "
            "folders of runs only"
        )
    from atomtrain.swarm.packages import require_swarm

    require_swarm("the dashboard of a swarm at an address")
    from atomtrain.cli.swarm import outside_config, pasted_addresses
    from atomtrain.views.dashboard.remote import SwarmSource

    run_name, known = pasted_addresses(addresses[0])
    return SwarmSource(outside_config(run_name, options.run_key, None), known)


def _listening(options: DashboardOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port} ({error.strerror}); choose another "
            "--host or --port (0 is any free one)"
        ) from error
    return listener


_WATCH_EXAMPLES = """\
  atom watch runs/mine              all peers of a run on this machine
  ssh -t host atom watch runs/mine  on another one"""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    target: Path = option(None, "Folder of a run or of a peer.", "FOLDER")


def run_watch(arguments: Sequence[str]) -> int:
    options = parse(
        WatchOptions,
        arguments,
        prog="atom watch",
        about="Show a run in the terminal: loss, speed, the last recorded step, peers.",
        examples=_WATCH_EXAMPLES,
        positional=("target",),
    )
    from atomtrain.views.dashboard.source import FolderSource

    source = FolderSource(options.target)
    if not sys.stdout.isatty():
        raise ConfigError(
            "'atom watch' needs a terminal; 'atom dashboard' shows the run in a browser"
        )
    try:
        from atomtrain.views.dashboard.terminal import Watch
    except ImportError as error:
        raise ConfigError(
            f"'atom watch' needs a package that is not installed ({error}); run "
            "pip install 'atomtrain[watch]'"
        ) from error
    Watch(source).run()
    return 0
