"""A small cluster on one machine: a network namespace for each worker, joined by limited links.

A namespace has no name. It is held by a process that the kernel kills with its parent, and with its
last process the kernel removes a namespace, its interfaces and their queues. So nothing is left
behind, however the parent ends, and nothing outside these namespaces is touched.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
DELAY = pathlib.Path(__file__).parent / "delay.py"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def tied(command: Sequence[str]) -> list[str]:
    """The command line of a process that the kernel kills with this one, its parent."""
    # A parent that died before the kernel was told to is another one by then.
    alive = ["sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"', str(os.getpid())]
    return ["setpriv", "--pdeathsig", "KILL", *alive, *command]


def bits_per_second(rate: str) -> float:
    """The number in a rate such as "100mbit" or "1gbit"."""
    match = re.fullmatch(r"([\d.]+)([kmg]bit)", rate)
    if not match:
        raise SystemExit(f"--rate: must be a number and a unit, as in 100mbit or 1gbit; got {rate}")
    return float(match[1]) * UNITS[match[2]]


def seconds(delay: str) -> float:
    """The number in a delay such as "0.5ms"."""
    match = re.fullmatch(r"([\d.]+)(us|ms|s)", delay)
    if not match:
        raise SystemExit(f"--delay: must be a number and a unit, as in 0.5ms or 50us; got {delay}")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


@dataclasses.dataclass(frozen=True)
class Loopback:
    """No namespaces, no limits: the workers are processes that talk over the loopback interface."""

    interface: str = "lo"

    def address(self, worker: int) -> str:
        """The same for all."""
        return "127.0.0.1"

    def command(self, worker: int, command: Sequence[str]) -> list[str]:
        """The command, which the kernel kills with this process."""
        return tied(command) if shutil.which("setpriv") else list(command)


@dataclasses.dataclass(frozen=True)
class Namespaces:
    """A namespace for each worker, and one for the bridge between them.

    The host name in a namespace is its address: what resolves its own host name to learn where
    others will find it, as gloo does, then needs no table of names.
    """

    hub: int
    workers: tuple[int, ...]
    interface: str = "eth0"

    def address(self, worker: int) -> str:
        """Where the others find a worker."""
        return f"10.77.0.{worker + 1}"

    def enter(self, pid: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in the namespaces of a process."""
        spaces = [f"--net=/proc/{pid}/ns/net", f"--uts=/proc/{pid}/ns/uts"]
        return tied(["nsenter", *spaces, *command])

    def command(self, worker: int, command: Sequence[str]) -> list[str]:
        """The command in a worker's namespaces."""
        return self.enter(self.workers[worker], command)

    def limit(self, rate: str) -> None:
        """Limits the links of all workers in both directions."""
        # Tokens make what is smaller than the bucket free, which would flatter small payloads;
        # with too small a bucket the kernel cannot keep up the rate.
        bucket = max(16_384, round(bits_per_second(rate) / 8 * 1e-3))
        limit = f"root tbf rate {rate} burst {bucket} latency 50ms".split()
        for worker, own in enumerate(self.workers):
            for pid, device in ((own, "eth0"), (self.hub, f"port{worker}")):
                _run(self.enter(pid, ["tc", "qdisc", "replace", "dev", device, *limit]))


@contextlib.contextmanager
def namespaces(workers: int, delay: str = "") -> Generator[Namespaces]:
    """Namespaces joined by links without limits, for as long as the context lasts.

    Each packet is delayed on its way, half on the link by which it leaves and half on the other.
    """
    late = seconds(delay) if delay else 0.0
    _check()
    holders = list[subprocess.Popen[bytes]]()
    try:
        for _ in range(workers + 1):
            hold = tied(["unshare", "--net", "--uts", "sleep", "infinity"])
            holders.append(subprocess.Popen(hold, start_new_session=True))
        network = Namespaces(holders[0].pid, tuple(holder.pid for holder in holders[1:]))
        for holder in holders:
            _wait_for_namespace(holder)
        if late:
            holders.append(_start_late_links(network, late))
            _wait_for_links(holders[-1])
        else:
            _make_links(network)
        _join(network)
        yield network
    finally:
        for holder in holders:
            holder.kill()
        for holder in holders:
            holder.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def _check() -> None:
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if os.geteuid() != 0 or missing:
        reason = f"without {', '.join(missing)}" if missing else "without root"
        raise SystemExit(
            f"Limited links need network namespaces, which cannot be made {reason}: install "
            "iproute2 and util-linux and run as root, or run over --loopback, without limits."
        )


def _wait_for_namespace(holder: "subprocess.Popen[bytes]") -> None:
    own = pathlib.Path("/proc/self/ns/net").readlink()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            # `unshare` has replaced itself by `sleep` once both namespaces are there.
            process = pathlib.Path(f"/proc/{holder.pid}")
            is_sleep = (process / "comm").read_text() == "sleep\n"
            if is_sleep and (process / "ns/net").readlink() != own:
                return
        if holder.poll() is not None:
            break
        time.sleep(0.01)
    raise SystemExit(
        "The kernel made no network namespace: run as root with CAP_SYS_ADMIN, or over --loopback."
    )


def _make_links(network: Namespaces) -> None:
    for worker, pid in enumerate(network.workers):
        pair = f"ip link add port{worker} type veth peer name eth0 netns {pid}"
        _run(network.enter(network.hub, pair.split()))


def _start_late_links(network: Namespaces, late: float) -> "subprocess.Popen[bytes]":
    # Not every kernel has a queue that delays packets, but programs can be links in all of them.
    pairs = [f"{pid}:eth0-{network.hub}:port{i}" for i, pid in enumerate(network.workers)]
    command = tied([sys.executable, str(DELAY), str(late / 2), *pairs])
    return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)


def _wait_for_links(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        if lines.readline() != b"ready\n":
            raise SystemExit("--delay: the links could not be made, as said above; leave it out.")


def _join(network: Namespaces) -> None:
    """Addresses, and a bridge between the links."""
    hub = network.hub
    _run(network.enter(hub, ["ip", "link", "add", "bridge", "type", "bridge"]))
    _run(network.enter(hub, ["ip", "link", "set", "bridge", "up"]))
    for worker, pid in enumerate(network.workers):
        port, address = f"port{worker}", network.address(worker)
        _run(network.enter(hub, ["ip", "link", "set", port, "master", "bridge", "up"]))
        # Congestion control that fills a short queue at once, and does not start again when idle.
        settings = "net.ipv4.tcp_congestion_control=reno net.ipv4.tcp_slow_start_after_idle=0"
        for command in (
            f"hostname {address}",
            f"ip address add {address}/24 dev eth0",
            "ip link set eth0 up",
            "ip link set lo up",
            f"sysctl -qw {settings}",
        ):
            _run(network.enter(pid, command.split()))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
