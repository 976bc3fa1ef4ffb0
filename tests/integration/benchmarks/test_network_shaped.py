"""Namespaces and shaped links, for real: needs root."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from atombench.common import BenchmarkOptions
from atombench.links.shaping import Link, Network, congestion_control
from atombench.network import network
from tests.support.network_inputs import SMALLEST
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.root
SERVER = """
import socket, time
listener = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
peer, _ = listener.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(int(peer.recv(1)[0])):
    peer.sendall(peer.recv(1))
count = 0
while data := peer.recv(1 << 20):
    count += len(data)
print(count, time.monotonic(), flush=True)
"""
CLIENT = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips_s = []
peer.sendall(bytes([5]))
for _ in range(5):  # in some of them either end may stand still
    begun_s = time.monotonic()
    peer.sendall(b"x")
    peer.recv(1)
    trips_s.append(time.monotonic() - begun_s)
print(min(trips_s), time.monotonic(), flush=True)
peer.sendall(bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR)
"""
HOLD = """
import sys, time
from pathlib import Path
from atombench.links.peers import Peers
from atombench.links.shaping import Link, Network
network = Network(2)
network.shape(Link(bits_per_s=1e6, round_trip_s=0.01))
peers = Peers("gloo", network, 2, Path(sys.argv[1]))
pids = [p.pid for p in [*network._holders, network._relay, *peers._processes]]
print(*pids, flush=True)
time.sleep(3600)
"""


def measure(net: Network, transfer_bytes: int) -> tuple[float, float]:
    """Return round trip and bits per second between two hosts.

    From before the first byte until after the last: who stands still makes it slower, never faster.
    """
    server = subprocess.Popen(
        [*net.entering(0), sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None
        server.stdout.readline()
        client = subprocess.run(
            [*net.entering(1), sys.executable, "-c", CLIENT, net.address(0), str(transfer_bytes)],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
        trip_s, begun_s = map(float, client.stdout.split())
        count, ended_s = map(float, server.stdout.readline().split())
        return trip_s, 8 * count / (ended_s - begun_s)


def test_links_have_the_rate_and_the_way_that_was_asked_for() -> None:
    with Network(2) as net:
        net.shape(Link(bits_per_s=2e7))
        wait_until(lambda: measure(net, 10_000)[0] < 0.4)
        assert measure(net, 4_000_000)[1] < 2.1e7
        net.shape(Link(bits_per_s=2e7, round_trip_s=0.4))
        assert measure(net, 10_000)[0] >= 0.4
        net.shape(Link(bits_per_s=None))
        wait_until(lambda: measure(net, 10_000)[0] < 0.4)
        wait_until(lambda: measure(net, 40_000_000)[1] > 2.5e7)


def test_far_hosts_send_frames_as_large_as_the_link_takes() -> None:
    setting = Path("/proc/sys/net/ipv4/tcp_tso_rtt_log")
    if not setting.exists():
        pytest.skip("this kernel has no tcp_tso_rtt_log")
    with Network(2) as net:
        for link, log in (
            (Link(bits_per_s=1e8, round_trip_s=0.05), 14),
            (Link(bits_per_s=1e8), 9),
        ):
            net.shape(link)
            for host in range(2):
                reading = [*net.entering(host), "cat", str(setting)]
                assert int(subprocess.check_output(reading)) == log


def test_links_lose_as_many_packets_as_was_asked_for() -> None:
    opening = "import socket,sys,time\nend=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\n"
    sender = opening + (
        "for _ in range(400): end.sendto(b'x', (sys.argv[1], 5001)); time.sleep(0.001)\n"
        "while True: end.sendto(b'end', (sys.argv[1], 5001)); time.sleep(0.01)\n"
    )
    receiver = opening + (
        "end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)\n"
        "end.bind(('0.0.0.0', 5001)); print('ready', flush=True); count = 0\n"
        "while end.recv(9) == b'x': count += 1\n"
        "print(count, flush=True)\n"
    )
    with Network(2) as net:
        net.shape(Link(bits_per_s=None, loss_share=0.3))

        def arrived() -> int:
            taking = [*net.entering(0), sys.executable, "-c", receiver]
            with subprocess.Popen(taking, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                server.stdout.readline()
                sending = [*net.entering(1), sys.executable, "-c", sender, net.address(0)]
                with subprocess.Popen(sending) as client:
                    count = int(server.stdout.readline())
                    client.kill()
                return count

        # While the machine stands still, queues overflow, and more gets lost.
        wait_until(lambda: 200 < arrived() < 350)


def test_a_user_who_is_not_root_has_a_network_in_a_namespace_of_his_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = subprocess.run(
        ["unshare", "--user", "--map-root-user", "true"], check=False, capture_output=True
    )
    if allowed.returncode != 0:
        pytest.skip("user namespaces are not allowed here")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with Network(2) as net:
        assert "--user" in net.entering(0)
        net.shape(Link(bits_per_s=2e7, round_trip_s=0.05))
        trip_s, rate = measure(net, 200_000)
        assert trip_s >= 0.05
        assert rate < 2.1e7


def test_nothing_is_left_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        pids = [int(pid) for pid in holder.stdout.readline().split()]
        assert len(pids) == 6
        holder.send_signal(signal.SIGKILL)
    wait_until(
        lambda: not any(running(pid) for pid in pids),
        lambda: str([pid for pid in pids if running(pid)]),
    )


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_benchmark_measures_every_method(tmp_path: Path) -> None:
    kept = tmp_path / "network.json"
    result = network.run(BenchmarkOptions(out=kept), SMALLEST)
    (row,) = result["rows"]
    assert row["errors"] == []
    assert (row["link_bits_per_s"], row["loss_share"]) == (1e8, 0.001)
    assert row["congestion_control"] in ("bbr", congestion_control())  # or the kernel refuses it
    assert row["probe"]["round_trip_s"] >= 0.01
    assert row["probe"]["bits_per_s"] < 1.1e8
    assert row["ratio"] == row["atom_tokens_per_s"] / row["pipeline_tokens_per_s"]
    assert row["data_parallel_tokens_per_s"] > 0
    assert row["swapped_parallel_tokens_per_s"] > 0
    assert all(trial["tokens_per_s"] for trial in row["pipeline"]["trials"])
    assert all(min(trial["own_compute_s"]) > 0 for trial in row["pipeline"]["trials"])
    assert row["bits_per_flop"] == 1e8 / result["peer_flops_per_s"]
    assert row["atom"]["device_peak_bytes"] <= result["device_budget_bytes"]
    assert row["pipeline"]["device_peak_bytes"] <= result["device_budget_bytes"]
    assert set(result["micro_batch_step_s"]) == {"4", "8"}
    for method in ("atom", "pipeline", "data_parallel", "swapped_parallel"):
        learnt = row[method]["curve"]
        assert len(learnt["loss"]) == len(learnt["seconds"]) == row[method]["steps"] or (
            method == "atom"  # its steps are those of all peers
        )
        assert 0 < row[method]["utilisation"] <= 1.5
    alone = row["atom"]["alone_tokens_per_s"]
    assert row["atom"]["share_of_alone"] == row["atom_tokens_per_s"] / alone
    assert row["atom"]["share_of_alone"] == statistics.median(row["atom"]["shares_of_alone"])
    assert len(row["atom"]["shares_of_alone"]) == SMALLEST.turns
    assert json.loads(kept.read_text()) == {**json.loads(json.dumps(result)), "complete": False}
    # A pipeline sends activations: far more for a token than averaging now and then.
    assert row["pipeline"]["sent_bytes_per_token"] > 2 * MODEL_BYTES_PER_TOKEN


MODEL_BYTES_PER_TOKEN = 64
"""One byte for each value of the hidden state."""
