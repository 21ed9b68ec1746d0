"""How much of a limited link rings get whose messages are cut over many TCP connections.

NCCL 2.29.7 sends each slice over several connections: on AWS over 16 for each of its channels (its
file net_socket.cc), of which a ring has two (connect.cc). This does the same without GPUs: four
namespaces, links limited by the token bucket of Adnan082/diloco-measured (32 KiB, a queue of 50 ms,
packets of 9,001 bytes), and rings that cut, pipeline and wait as NCCL's do, with slices of 1 MiB in
an all-reduce and of 512 KiB in a broadcast. It needs root, and takes ten minutes; on a machine
that does other things start it with `chrt -r 1`.
"""

import argparse
import collections
import json
import pathlib
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # what the benchmarks share

WORKERS, PORT = 4, 29_600
TASK = 1 << 16
"""The least that NCCL sends over a connection at once."""
CONNECTIONS = ((1, 1), (1, 16), (2, 16))
"""Channels, and connections of each."""
RATES = {"50mbit": 32 << 20, "200mbit": 128 << 20}
"""Links, and how many bytes are sent over them."""
ZEROS = bytes(1 << 20)


class Shape(NamedTuple):
    """How a collective is cut in one channel."""

    slices: int  # that a worker sends
    size: int  # of one, in bytes
    free: int  # of how many that follow each other the first ones wait for nothing; 0: all wait
    lag: int  # a slice waits for the one that came so many before it
    window: int  # how many are on their way to the kernel at most


def all_reduce(size: int) -> Shape:
    """A ring: chunks of two slices in 2 (w - 1) steps, again and again."""
    piece = min(1 << 20, max(1, size // (2 * WORKERS)))
    loops = max(1, round(size / (2 * piece * WORKERS)))
    steps = 2 * (WORKERS - 1)
    return Shape(loops * steps * 2, piece, steps * 2, 2, 4)


def broadcast(size: int) -> Shape:
    """A chain: each slice as soon as it came."""
    piece = min(1 << 19, size)
    return Shape(max(1, size // piece), piece, 0, 0, 8)


class Channel:
    """What a worker sends to the next and gets from the one before, over its connections."""

    def __init__(self, shape: Shape, sends: bool, gets: bool, connections: int) -> None:
        self.shape, self.root = shape, not gets
        self.to_send = shape.slices if sends else 0
        self.to_get = shape.slices if gets else 0
        self.begun = self.got = 0
        self.going = collections.deque[list[int]]()  # bytes left of each slice on its way out
        self.coming = collections.deque[list[int]]()
        self.out: list[collections.deque[tuple[int, list[int]]]]
        self.out = [collections.deque() for _ in range(connections)]
        self.into: list[collections.deque[tuple[int, list[int]]]]
        self.into = [collections.deque() for _ in range(connections)]
        self.next_out = 0
        next_in = 0
        for _ in range(self.to_get):
            left = [shape.size]
            self.coming.append(left)
            next_in = self._cut(left, self.into, next_in)

    def _cut(self, left: list[int], queues: list[Any], first: int) -> int:
        task = max(TASK, -(-left[0] // len(queues)))
        for start in range(0, left[0], task):
            queues[first].append((min(task, left[0] - start), left))
            first = (first + 1) % len(queues)
        return first

    def begin(self) -> None:
        """Hands to the connections what may leave."""
        while self.coming and not self.coming[0][0]:
            self.coming.popleft()
            self.got += 1
        while self.going and not self.going[0][0]:
            self.going.popleft()
        while self.begun < self.to_send and len(self.going) < self.shape.window:
            free = self.root or (self.shape.free and self.begun % self.shape.free < self.shape.lag)
            if not free and self.got <= self.begun - self.shape.lag:
                return
            left = [self.shape.size]
            self.going.append(left)
            self.next_out = self._cut(left, self.out, self.next_out)
            self.begun += 1

    @property
    def done(self) -> bool:
        """Whether all left and came."""
        return self.begun == self.to_send and not self.going and not self.coming


def run(shape: Shape, chain: bool, rank: int, ends: Any) -> None:
    """One collective of a worker, over all channels at once."""
    sends, gets = not chain or rank < WORKERS - 1, not chain or rank > 0
    outs, ins = ends
    channels = [Channel(shape, sends, gets, len(own)) for own in outs]
    scratch, chooser = bytearray(1 << 20), selectors.DefaultSelector()
    waiting = set[tuple[int, int]]()
    for c, own in enumerate(ins):
        for i, end in enumerate(own):
            chooser.register(end, selectors.EVENT_READ, ("in", c, i))
    while True:
        for channel in channels:
            channel.begin()
        for c, channel in enumerate(channels):
            for i, queue in enumerate(channel.out):
                if queue and (c, i) not in waiting and not _push(outs[c][i], queue):
                    chooser.register(outs[c][i], selectors.EVENT_WRITE, ("out", c, i))
                    waiting.add((c, i))
        for channel in channels:
            channel.begin()
        if all(channel.done for channel in channels):
            break
        if any(q for c, ch in enumerate(channels) for i, q in enumerate(ch.out)
               if (c, i) not in waiting):  # fmt: skip
            continue
        for key, _ in chooser.select():
            way, c, i = key.data
            if way == "out":
                chooser.unregister(outs[c][i])
                waiting.discard((c, i))
            else:
                _pull(ins[c][i], channels[c].into[i], scratch)
    chooser.close()


def _push(end: socket.socket, queue: "collections.deque[tuple[int, list[int]]]") -> bool:
    """Hands to the kernel what it takes; whether that was all."""
    while queue:
        size, left = queue[0]
        try:
            taken = end.send(memoryview(ZEROS)[:size])
        except BlockingIOError:
            return False
        left[0] -= taken
        queue.popleft()
        if taken < size:
            queue.appendleft((size - taken, left))
    return True


def _pull(
    end: socket.socket, queue: "collections.deque[tuple[int, list[int]]]", scratch: bytearray
) -> None:
    """Takes what came, of what is expected now."""
    while queue:
        size, left = queue[0]
        try:
            came = end.recv_into(scratch, size)
        except BlockingIOError:
            return
        if not came:
            raise SystemExit("a neighbor is gone")
        left[0] -= came
        queue.popleft()
        if came < size:
            queue.appendleft((size - came, left))


def meet(rank: int, channels: int, connections: int) -> Any:
    """The connections to the next worker and from the one before, by channel."""
    with socket.create_server(("", PORT), backlog=256) as server:
        nearest = f"10.77.0.{(rank + 1) % WORKERS + 1}"
        outs = [[_connect(nearest, c, i) for i in range(connections)] for c in range(channels)]
        ins: list[list[Any]] = [[None] * connections for _ in range(channels)]
        for _ in range(channels * connections):
            end, _ = server.accept()
            c, i = end.recv(2, socket.MSG_WAITALL)
            ins[c][i] = end
    for own in (*outs, *ins):
        for end in own:
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")  # as on Ubuntu
    return outs, ins


def _connect(address: str, channel: int, number: int) -> socket.socket:
    for _ in range(200):
        try:
            end = socket.create_connection((address, PORT))
        except OSError:
            time.sleep(0.05)
            continue
        end.sendall(bytes((channel, number)))
        return end
    raise SystemExit(f"no worker at {address}")


def worker(rank: int, size: int, channels: int, connections: int, repeats: int) -> None:
    """Times both collectives; worker 0 prints the seconds."""
    ends = meet(rank, channels, connections)
    small = all_reduce(8)
    found = dict[str, list[float]]()
    for kind, shape in (("all-reduce", all_reduce), ("broadcast", broadcast)):
        for _ in range(repeats):
            run(small, False, rank, ends)  # all begin together
            begun = time.perf_counter()
            run(shape(size // channels), kind == "broadcast", rank, ends)
            run(small, False, rank, ends)
            found.setdefault(kind, []).append(time.perf_counter() - begun)
    if rank == 0:
        print(json.dumps(found))


def measured(rate: str, size: int, channels: int, connections: int, repeats: int) -> dict[str, Any]:
    """The seconds of both collectives over links of a rate, and the packets that were dropped."""
    from network import namespaces

    with namespaces(WORKERS) as network:
        limit = f"root tbf rate {rate} burst 32768 latency 50ms".split()
        for i, pid in enumerate(network.workers):
            for place, device in ((network.hub, f"port{i}"), (pid, "eth0")):
                _do(network.enter(place, f"ip link set {device} mtu 9001".split()))
            _do(network.enter(pid, ["sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=1"]))
            _do(network.enter(pid, ["tc", "qdisc", "replace", "dev", "eth0", *limit]))
        own = [sys.executable, __file__, "--worker"]
        how = [str(value) for value in (size, channels, connections, repeats)]
        started = [
            subprocess.Popen(
                network.command(rank, [*own, str(rank), *how]), stdout=subprocess.PIPE, text=True
            )
            for rank in range(WORKERS)
        ]
        texts = [process.communicate(timeout=600)[0] for process in started]
        dropped = 0
        for pid in network.workers:
            told = _do(network.enter(pid, ["tc", "-s", "qdisc", "show", "dev", "eth0"]))
            dropped += int(re.findall(r"dropped (\d+)", told)[0])
    return {"seconds": json.loads(texts[0]), "dropped": dropped}


def _do(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def share_table(rows: list[dict[str, Any]]) -> str:
    """The shares of each link, as the page has them: the median, the least and the most."""
    from _record import markdown

    cells = [
        [
            row["rate"].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s"),
            row["kind"],
            str(row["connections"]),
            f"{100 * statistics.median(row['share']):.0f} %",
            f"{100 * min(row['share']):.0f} to {100 * max(row['share']):.0f} %",
        ]
        for row in rows
    ]
    return markdown(["link", "collective", "connections", "of the link", "turns"], cells)


def main() -> None:
    """Measures each rate with one connection and with many, and writes what it took."""
    if sys.argv[1:2] == ["--worker"]:
        worker(*map(int, sys.argv[2:]))
        return
    from _record import RESULTS, folder_at, head, write
    from network import bits_per_second

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=folder_at, default=RESULTS / "others")
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--starts", type=int, default=3, help="how often all begins anew")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each start")
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    for rate in args.rates:
        for channels, connections in CONNECTIONS:
            size = RATES[rate]
            how = rate, size, channels, connections, args.repeats
            starts = [measured(*how) for _ in range(args.starts)]
            for kind, shape in (("all-reduce", all_reduce), ("broadcast", broadcast)):
                cut = shape(size // channels)
                sent = channels * cut.slices * cut.size
                seconds = [took for start in starts for took in start["seconds"][kind]]
                row = {"rate": rate, "kind": kind, "connections": channels * connections}
                row |= {"bytes": sent, "seconds": seconds}
                row["share"] = [sent * 8 / bits_per_second(rate) / took for took in seconds]
                row["dropped"] = sum(start["dropped"] for start in starts)
                rows.append(row)
                print(row)
    write(args.out / "short_queue.json", head() | {"rows": rows}, "rows")
    print(share_table(rows))


if __name__ == "__main__":
    main()
