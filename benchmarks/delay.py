"""Links that take their time: carries frames between network devices, each so many seconds late.

Run as a process of its own, `delay.py SECONDS PID:DEVICE-PID:DEVICE ...`: it makes the two devices
of each pair in the network namespaces of those processes, says "ready", and joins them until it is
killed. The devices go with it.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import pathlib
import select
import struct
import sys
import time

SET_DEVICE, SET_OFFLOAD = 0x400454CA, 0x400454D0
ETHERNET, NO_INFO, OFFLOAD_HEADER = 0x2, 0x1000, 0x4000
CHECKSUMS, SEGMENTS = 0x1, 0x2  # what the kernel may leave undone, as no wire is between
LARGEST = 1 << 17


def device(pid: str, name: str) -> int:
    """A new Ethernet device in the network namespace of a process, as an open file."""
    with pathlib.Path(f"/proc/{pid}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"no way into the network namespace of {pid}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = ETHERNET | NO_INFO | OFFLOAD_HEADER
    fcntl.ioctl(file, SET_DEVICE, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(file, SET_OFFLOAD, CHECKSUMS | SEGMENTS)
    return file


def carry(other_end: dict[int, int], seconds: float) -> None:
    """Moves frames from each file to its other end, for ever."""
    late = collections.deque[tuple[float, int, bytes]]()  # when due, and to where
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        for file in select.select(other_end, (), (), wait)[0]:
            with contextlib.suppress(BlockingIOError):
                while frame := os.read(file, LARGEST):
                    late.append((time.monotonic() + seconds, other_end[file], frame))
        while late and late[0][0] <= time.monotonic():
            _, file, frame = late.popleft()
            with contextlib.suppress(OSError):  # a device that is down loses frames, as a cable
                os.write(file, frame)


def main(seconds: str, *pairs: str) -> None:
    """Makes the devices and joins them."""
    with contextlib.suppress(PermissionError):  # before the workers, which would starve it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    other_end = dict[int, int]()
    for pair in pairs:
        one, two = (device(*end.split(":")) for end in pair.split("-"))
        other_end |= {one: two, two: one}
    print("ready", flush=True)
    carry(other_end, float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
