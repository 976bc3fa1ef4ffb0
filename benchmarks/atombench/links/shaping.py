"""Hosts in network namespaces of their own, joined by links of given rate, round trip and loss.

Each host has one interface, `eth0`, whose other end is a port of a switch in one more namespace.
Both ends of each link carry a token bucket (`tc tbf`), so both directions have the rate. Delay
and loss are added in the switch, by the kernel's bridge being cut in two and joined by
`shaping_delay`.

A namespace lives as long as the processes in it. Here that is one `cat` that reads a pipe of this
process: however this process ends, the pipe closes, and kernel and `cat` remove everything. Nothing
has a name outside, and no packet leaves.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from atomtrain.errors import ConfigError

INTERFACE = "eth0"
"""Every host's interface to the others."""
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_NAT = f"""
add table ip nat
add chain ip nat out {{ type nat hook postrouting priority 100; }}
add rule ip nat out oifname {INTERFACE} masquerade
add table ip guard
add chain ip guard through {{ type filter hook forward priority 0; policy drop; }}
add rule ip guard through iifname lan0 accept
add rule ip guard through ct state established,related accept
"""
_LARGE_FRAMES = """
setting=/proc/sys/net/ipv4/tcp_tso_rtt_log
test ! -e $setting || echo "$1" > $setting
"""
"""Kernels before 5.18 have no such setting: the relay has more to do there."""
_HOLD = ("sh", "-c", "echo ready; exec cat")
_BURST_S = 0.004
_LEAST_BURST_BYTES = 3_200
_QUEUE_S = 0.05
_LEAST_QUEUE_BYTES = 48_000
_COMMAND_S = 20.0
_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_SEGMENTS_MAX = "65535"
"""What the kernel has by itself."""
_FRAME_S = 0.001
"""A frame on its way through a relay is what the link passes in it, at most."""
_LARGEST_FRAME_BYTES = 1 << 16
_LEAST_FRAME_BYTES = 1 << 12
"""Where it would be less, hosts send as they do by themselves."""
_TSO_RTT_LOG = 9
"""What the kernel has by itself."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins each host to the switch; all hosts alike."""

    bits_per_s: float | None
    """Rate of each direction; `None`: as fast as this machine can."""
    round_trip_s: float = 0.0
    """Added to the round trip between any two hosts."""
    loss_share: float = 0.0
    """So many of all packets are lost on their way, at random; 0 to 0.5."""

    def __post_init__(self) -> None:
        if self.bits_per_s is not None and not 1e3 <= self.bits_per_s <= 1e11:
            raise ConfigError(f"a link needs 1 kbit/s to 100 Gbit/s, not {self.bits_per_s:g} bit/s")
        if not 0 <= self.round_trip_s <= 10:
            raise ConfigError(f"a round trip takes 0 to 10 s, not {self.round_trip_s:g} s")
        if not 0 <= self.loss_share <= 0.5:
            raise ConfigError(f"a link loses 0 to 0.5 of its packets, not {self.loss_share:g}")

    @property
    def burst_s(self) -> float:
        """What an idle link saves up and passes at once, as the time that takes at its rate."""
        if self.bits_per_s is None:
            return 0.0
        # A larger burst would let more than the rate through, a smaller one less.
        return max(_BURST_S, 8 * _LEAST_BURST_BYTES / self.bits_per_s)

    @property
    def tso_rtt_log(self) -> int:
        """Linux's `tcp_tso_rtt_log` for the hosts: how large frames TCP sends at this round trip.

        By itself it sends frames of up to 64 KiB to hosts that are near and of 3 kB, so many that
        passing them on slows the network down, to those that are far. With this logarithm L they
        are up to 64 KiB >> (round trip in us >> L) larger.
        """
        frame_bytes = _LARGEST_FRAME_BYTES
        if self.bits_per_s is not None:
            frame_bytes = min(frame_bytes, int(_FRAME_S * self.bits_per_s / 8))
        if frame_bytes < _LEAST_FRAME_BYTES:
            return _TSO_RTT_LOG
        halvings = math.ceil(math.log2(_LARGEST_FRAME_BYTES / frame_bytes))
        trip_us = int(1e6 * self.round_trip_s)
        return max((log for log in range(_TSO_RTT_LOG, 31) if trip_us >> log >= halvings),
                   default=_TSO_RTT_LOG)  # fmt: skip

    def bucket(self) -> list[str]:
        """Return the token bucket's arguments to `tc`; empty without a rate."""
        if self.bits_per_s is None:
            return []
        bytes_per_s = self.bits_per_s / 8
        burst_bytes = round(bytes_per_s * self.burst_s)
        wait_s = max(_QUEUE_S, self.round_trip_s)
        queue_bytes = max(_LEAST_QUEUE_BYTES, int(bytes_per_s * wait_s)) + burst_bytes
        rate = f"{int(self.bits_per_s)}bit"
        return ["tbf", "rate", rate, "burst", f"{burst_bytes}b", "limit", f"{queue_bytes}b"]


def congestion_control() -> str:
    """Return this machine's for TCP connections that do not choose one: the hosts have it, too."""
    return _CONTROL.read_text(encoding="ascii").strip()


class Network:
    """Some hosts and a switch; a context that leaves nothing behind."""

    def __init__(self, hosts: int) -> None:
        """Build unshaped links between `hosts` namespaces.

        Raises:
            ConfigError: this machine or user cannot make namespaces; says what is needed.
        """
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing or sys.platform != "linux":
            raise ConfigError(
                f"shaped networks need Linux with {', '.join(_TOOLS)}; not found: "
                f"{', '.join(missing)}; install the packages iproute2 and util-linux"
            )
        self.hosts = hosts
        self._user = os.geteuid() != 0
        self._holders: list[subprocess.Popen[bytes]] = []
        self._inside: dict[int, subprocess.Popen[bytes]] = {}
        """By host: who keeps its namespace, if its place in the network is its router's."""
        self._relay: subprocess.Popen[bytes] | None = None
        self._shaped = self._relayed = self._single = False
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def address(self, host: int) -> str:
        """Return a host's IPv4 address; behind a router it means nothing to others."""
        if host in self._inside:
            return f"192.168.{host % 250}.2"
        return f"10.77.{host // 250}.{host % 250 + 1}"

    def entering(self, host: int) -> list[str]:
        """Return what to put before a command so that it runs on a host."""
        return self._enter(self._inside.get(host, self._holders[host + 1]).pid)

    def put_behind_nat(self, host: int) -> None:
        """Put a router in a host's place that translates addresses, and the host behind it.

        It can dial others; nobody can dial it. To be called before anything runs there.

        Raises:
            ConfigError: `nft` is not installed, or the kernel cannot translate addresses.
        """
        if shutil.which("nft") is None:
            raise ConfigError("a NAT needs nft, which is not found; install the package nftables")
        router = self._enter(self._holders[host + 1].pid)
        inside = [] if not self._user else self._enter(self._holders[0].pid)[:-1]
        holder = self._hold(inside)
        self._inside[host] = holder
        there, network = self.entering(host), f"192.168.{host % 250}"
        ends = ["type", "veth", "peer", "name", INTERFACE, "netns", str(holder.pid)]
        _run([*router, "ip", "link", "add", "lan0", *ends])
        _run([*router, "ip", "address", "add", f"{network}.1/24", "dev", "lan0"])
        _run([*router, "ip", "link", "set", "lan0", "up"])
        _run([*there, "ip", "link", "set", "lo", "up"])
        _run([*there, "ip", "address", "add", f"{network}.2/24", "dev", INTERFACE])
        _run([*there, "ip", "link", "set", INTERFACE, "up"])
        _run([*there, "ip", "route", "add", "default", "via", f"{network}.1"])
        _run([*router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        _run([*router, "nft", _NAT])

    def shape(self, link: Link) -> None:
        """Give all links a rate and a round trip; connections that exist go on.

        Raises:
            ConfigError: the kernel lacks what it takes; names the command that failed.
        """
        bucket = link.bucket()
        for host in range(self.hosts):
            for prefix, device in (
                (self.entering(host), INTERFACE),
                (self._switch(), f"p{host}"),
            ):
                if bucket:
                    _run([*prefix, "tc", "qdisc", "replace", "dev", device, "root", *bucket])
                elif self._shaped:
                    _run([*prefix, "tc", "qdisc", "del", "dev", device, "root"])
        self._shaped = bool(bucket)
        self._delay(link)

    def close(self) -> None:
        """Remove everything; idempotent."""
        for process in (*([self._relay] if self._relay else []), *reversed(self._holders)):
            assert process.stdin is not None
            process.stdin.close()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._relay, self._holders, self._inside = None, [], {}

    def _build(self) -> None:
        self._hold([])
        switch = self._switch()
        _run([*switch, "ip", "link", "set", "lo", "up"])
        _run([*switch, "ip", "link", "add", "br0", "type", "bridge"])
        _run([*switch, "ip", "link", "set", "br0", "up"])
        for host in range(self.hosts):
            inside = [] if not self._user else self._enter(self._holders[0].pid)[:-1]
            self._hold(inside)
            pid, port = str(self._holders[-1].pid), f"p{host}"
            ends = ["type", "veth", "peer", "name", INTERFACE, "netns", pid]
            _run([*switch, "ip", "link", "add", port, *ends])
            _run([*switch, "ip", "link", "set", port, "master", "br0", "up"])
            there = self.entering(host)
            _run([*there, "ip", "link", "set", "lo", "up"])
            address = f"{self.address(host)}/16"
            _run([*there, "ip", "address", "add", address, "dev", INTERFACE])
            _run([*there, "ip", "link", "set", INTERFACE, "up"])

    def _hold(self, inside: Sequence[str]) -> subprocess.Popen[bytes]:
        """Return the process that keeps a new namespace, within `inside`'s user namespace."""
        owner = ["--user", "--map-root-user"] if self._user and not inside else []
        holder = subprocess.Popen(
            [*inside, "unshare", *owner, "--net", *_HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        with holder.stderr:
            if holder.stdout.readline() != b"ready\n":
                why = holder.stderr.read().decode(errors="replace").strip() or "no reason given"
                raise ConfigError(
                    f"cannot make a network namespace ({why}); run as root, or allow users their "
                    "own namespaces (sysctl kernel.unprivileged_userns_clone=1, "
                    "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces "
                    "above 0)"
                )
        return holder

    def _enter(self, pid: int) -> list[str]:
        user = ["--user", "--preserve-credentials"] if self._user else []
        return ["nsenter", "--target", str(pid), *user, "--net"]

    def _switch(self) -> list[str]:
        return self._enter(self._holders[0].pid)

    def _delay(self, link: Link) -> None:
        one_way_s, loss_share = link.round_trip_s / 2, link.loss_share
        relayed = one_way_s > 0 or loss_share > 0
        if relayed and self._relay is None:
            self._start_relay()
        if self._relay is not None:
            assert self._relay.stdin is not None
            self._relay.stdin.write(f"{one_way_s!r} {loss_share!r}\n".encode())
            self._relay.stdin.flush()
        if relayed != self._relayed:
            for host in range(self.hosts):
                bridge = f"d{host}" if relayed else "br0"
                _run([*self._switch(), "ip", "link", "set", f"p{host}", "master", bridge])
        self._relayed = relayed
        log = link.tso_rtt_log if relayed else _TSO_RTT_LOG
        for host in range(self.hosts):
            _run([*self.entering(host), "sh", "-c", _LARGE_FRAMES, "sh", str(log)])
        if (loss_share > 0) != self._single:
            # Else the kernel hands on dozens of packets as one, which would be lost together.
            segments = "1" if loss_share > 0 else _SEGMENTS_MAX
            for host in range(self.hosts):
                device = ("dev", INTERFACE, "gso_max_segs", segments)
                _run([*self.entering(host), "ip", "link", "set", *device])
        self._single = loss_share > 0

    def _start_relay(self) -> None:
        """Give each port a bridge of its own, and the relay a tap in each of them."""
        switch = self._switch()
        self._relay = subprocess.Popen(
            [*switch, sys.executable, "-m", "atombench.links.shaping_delay", str(self.hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != b"ready\n":
            raise ConfigError(
                "cannot add a delay: /dev/net/tun cannot be used; load the kernel module tun, or "
                "let this user open it"
            )
        for host in range(self.hosts):
            _run([*switch, "ip", "link", "add", f"d{host}", "type", "bridge"])
            _run([*switch, "ip", "link", "set", f"d{host}", "up"])
            _run([*switch, "ip", "link", "set", f"t{host}", "master", f"d{host}", "up"])


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{' '.join(command)} did not end within {_COMMAND_S:.0f} s") from error
    if done.returncode != 0:
        raise ConfigError(
            f"the network cannot be built: {' '.join(command)} says {done.stderr.strip()!r}; "
            "it needs root or user namespaces, and a kernel with veth, bridge and tbf"
        )
