"""Rings that cut their messages over many connections, here without any limit."""

import importlib
import pathlib
import socket
import threading

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks/others"
SIZE = 3 << 20


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("short_queue")


def test_a_ring_sends_what_a_ring_sends(queue):
    for size in (1 << 22, SIZE):
        cut = queue.all_reduce(size)
        sent = 2 * (queue.WORKERS - 1) / queue.WORKERS * size
        assert cut.slices * cut.size == pytest.approx(sent, rel=0.25)
        whole = queue.broadcast(size)
        assert whole.slices * whole.size == size


@pytest.mark.parametrize(("channels", "connections"), [(1, 1), (1, 16), (2, 16)])
@pytest.mark.parametrize("chain", [False, True])
def test_all_that_is_sent_arrives(queue, channels, connections, chain):
    """Each worker ends, so each has got every slice that it waits for."""
    ranks = range(queue.WORKERS)
    pairs = [
        [[socket.socketpair() for _ in range(connections)] for _ in range(channels)] for _ in ranks
    ]
    ends = [end for own in pairs for channel in own for pair in channel for end in pair]
    for end in ends:
        end.setblocking(False)
    cut = (queue.broadcast if chain else queue.all_reduce)(SIZE // channels)

    def work(rank):
        outs = [[pair[0] for pair in channel] for channel in pairs[rank]]
        ins = [[pair[1] for pair in channel] for channel in pairs[rank - 1]]
        queue.run(cut, chain, rank, (outs, ins))

    workers = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not any(worker.is_alive() for worker in workers)
    for end in ends:
        with pytest.raises(BlockingIOError):
            end.recv(1)
    for end in ends:
        end.close()
