"""Data-parallel training over several processes, compressed: the same command on every host.

By hand, each process is told where process 0 listens, how many there are, and which it is:

    python examples/multihost.py --coordinator 10.0.0.1:1234 --processes 2 --process 0
    python examples/multihost.py --coordinator 10.0.0.1:1234 --processes 2 --process 1

Under SLURM, Open MPI 4 and Kubernetes JAX finds that out: docs/multihost.md has the commands.

With `--checkpoints FOLDER`, on a file system that all of them see, it saves as it goes, and with
`--resume` it goes on from the newest checkpoint, also with another number of processes:

    python examples/multihost.py ... --checkpoints runs/lm --resume
"""

import argparse
import hashlib
import os
import pathlib
import re
import socket
import sys
import sysconfig
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fftgrad as fg
from fftgrad import checkpoint

CONTEXT = 8  # bytes from which the model predicts the next one
Params = Any


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--coordinator", help="host:port where process 0 listens; None: JAX finds it")
    add("--processes", type=int, help="how many processes there are; None: JAX finds it")
    add("--process", type=int, help="the number of this one, from 0; None: JAX finds it")
    add("--heartbeat", type=int, default=3, help="seconds of silence after which a process is dead")
    add("--steps", type=int, default=200, help="optimizer steps")
    add("--checkpoints", help="a folder that all processes see; None: none are written")
    add("--every", type=int, default=50, help="steps from one checkpoint to the next")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--batch", type=int, default=64, help="examples a device and step")
    args = parser.parse_args()
    host_and_port = r"(\[.+\]|[^:]+):\d+"
    address = args.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is not None and not re.fullmatch(host_and_port, address):
        parser.error(f"--coordinator: must be host:port, got {address!r}; write 10.0.0.1:1234")
    if args.resume and not args.checkpoints:
        parser.error("--resume: must have a folder to resume from; add --checkpoints FOLDER")
    return args


def first_params() -> Params:
    """From one seed, and so the same on all processes."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (256, 16), "hidden": (CONTEXT * 16, 128), "out": (128, 256)}
    return {n: rng.normal(0, s[0] ** -0.5, s).astype(np.float32) for n, s in shapes.items()}


def loss(params: Params, batch: jax.Array) -> jax.Array:
    """Nats per byte of a batch uint8[B, CONTEXT + 1]."""
    embedded = params["embed"][batch[:, :-1]].reshape(batch.shape[0], -1)
    logits = jnp.tanh(embedded @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1]).mean()


def train(args: argparse.Namespace) -> None:
    """Trains on all devices of all processes; each device is a worker."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    codec = fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.05), fg.LogQuantizer(bits=8))
    exchange = fg.AllGather(codec)
    memory = fg.ErrorFeedback(decay=0.95)
    tx = fg.optimizers.feedback_adam(2e-3, exchange, memory, axis_name="data")

    def step(params: Params, state: Any, batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, grads = fg.value_and_grad(loss, "data")(params, batch)  # of this worker's batch
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

    params = jax.device_put(first_params(), NamedSharding(mesh, P()))
    state = fg.init_state(tx, params, mesh, "data")
    specs = fg.state_specs(state, "data")
    train_step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
        ),
        donate_argnums=(0, 1),
    )

    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    own = [i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
    first = 0
    if args.resume:
        try:
            fresh = {"params": params, "state": state, "steps": 0}
            found = checkpoint.restore(args.checkpoints, fresh)
            params, state, first = (found.tree[name] for name in fresh)
            say(f"from step {first}, of {found.workers[0]} workers, with {found.workers[1]}")
        except FileNotFoundError as error:
            say(f"from the start: {error}")
    for count in range(first, args.steps):
        # No two workers see the same, and a run that goes on sees what it would have seen.
        streams = [np.random.default_rng((worker, count)) for worker in own]
        starts = [rng.integers(text.size - CONTEXT, size=args.batch) for rng in streams]
        rows = text[np.concatenate(starts)[:, None] + np.arange(CONTEXT + 1)]
        batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), rows)
        params, state, value = train_step(params, state, batch)
        if count % 20 == 0 or count == args.steps - 1:
            say(f"step {count:4} loss {float(value):.4f}")
        done = count + 1
        if args.checkpoints and (done % args.every == 0 or done == args.steps):
            tree = {"params": params, "state": state, "steps": done}
            checkpoint.save(args.checkpoints, done, tree)
    # The residual has rows on all processes, so all of them call this; process 0 prints it.
    found = fg.metrics(state) | {"bytes": fg.wire_bytes(exchange, params)}
    say(" ".join(f"{name} {float(value):.6g}" for name, value in found.items()))
    say(f"parameters {digest(params)}")


def digest(params: Params) -> str:
    """A hash of all bits."""
    return hashlib.sha256(b"".join(np.asarray(params[n]).tobytes() for n in params)).hexdigest()


def say(line: str) -> None:
    """Prints, in process 0."""
    if jax.process_index() == 0:
        print(line, flush=True)


def say_if_nameless() -> None:
    """Gloo, by which processes on CPUs reach each other, asks for the address of this host's name.

    It says no more than that a call failed.
    """
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        print(
            f"This host cannot find the address of its own name {name!r}, which collectives of "
            f"CPUs need; add '127.0.0.1 {name}' to /etc/hosts, or, where other hosts take part, "
            "the address at which they reach it.",
            file=sys.stderr,
            flush=True,
        )


def main() -> None:
    """Connects, trains, and ends at once if anything fails, here or in another process."""
    args, who = parse_args(), "a process that is not connected yet"
    try:
        # A collective may wait for ever for a process that died; missing heartbeats end this one.
        jax.distributed.initialize(
            args.coordinator,
            args.processes,
            args.process,
            heartbeat_timeout_seconds=args.heartbeat,
        )
        who = f"process {jax.process_index()} of {jax.process_count()}"
        train(args)
        jax.distributed.shutdown()
    except BaseException:
        # Where a collective broke, another process is gone, and its own log says why.
        print(f"{who} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        say_if_nameless()
        os._exit(1)  # an ordinary exit waits for the others, and they wait for this one


if __name__ == "__main__":
    main()
