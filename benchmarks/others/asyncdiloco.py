"""DiLoCo by its authors: the notebook of local SGD, run on the CPU."""

import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from others._both import AXIS, Row

import fftgrad as fg

REPOSITORY = "google-deepmind/asyncdiloco"
LICENSE = "Apache-2.0"
NOTEBOOK = "AsyncLocalSGDToyExample.ipynb"
DEFINITIONS = (2, 4, 5)
"""Its cells that import, make the data, and define the experiments."""
WORKERS, EVERY, BATCH = 4, 20, 32
HIDDEN, PHASES = 256, 10


class Outer(NamedTuple):
    """An outer optimizer, as torch and as optax have it."""

    words: str
    theirs: dict[str, Any]
    ours: optax.GradientTransformation


NESTEROV = Outer(
    "Nesterov 0.7",
    {
        "outer_opt_name": "nesterov",
        "outer_opt_kwargs": {"lr": 0.7, "nesterov": True, "momentum": 0.9},
    },
    optax.sgd(0.7, momentum=0.9, nesterov=True),
)
PLAIN = Outer(
    "SGD 0.5",
    {"outer_opt_name": "sgd", "outer_opt_kwargs": {"lr": 0.5, "momentum": 0.0}},
    optax.sgd(0.5),
)


def notebook(checkout: pathlib.Path) -> list[dict[str, Any]]:
    """Its cells."""
    return json.loads((checkout / NOTEBOOK).read_text())["cells"]


def defined(checkout: pathlib.Path) -> dict[str, Any]:
    """What its first cells define, on the CPU."""
    names: dict[str, Any] = {}
    cells = notebook(checkout)
    for number in DEFINITIONS:
        exec("".join(cells[number]["source"]), names)
    names["DEVICE"] = "cpu"
    return names


def renewed(inner: optax.GradientTransformation, every: int) -> optax.GradientTransformation:
    """An optimizer that forgets after so many steps, as one that is made anew does."""

    def init(params: Any) -> Any:
        return jnp.zeros((), jnp.int32), inner.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count, own = state
        own = optax.tree.where(count % every == 0, inner.init(params), own)
        updates, own = inner.update(updates, own, params)
        return updates, (count + 1, own)

    return optax.GradientTransformation(init, update)


def rate(total: int) -> Callable[[Any], Any]:
    """Their learning rate: a cosine, but for the first step of each phase, which has its peak."""
    peak, least = 2e-4, 1e-6

    def at(count: Any) -> Any:
        cosine = 0.5 * (1 + jnp.cos(math.pi * jnp.minimum(count / total, 1.0)))
        return jnp.where(count % EVERY == 0, peak, least + (peak - least) * cosine)

    return at


def losses(
    experiment: Any, outer: Outer, *, phases: int = PHASES, renew: bool = True
) -> list[float]:
    """The losses of fftgrad's `diloco` with the experiment's parameters, batches and test set."""
    total = experiment.max_local_updates_per_data
    adam = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-3))
    inner = optax.chain(
        renewed(adam, EVERY) if renew else adam, optax.scale_by_learning_rate(rate(total))
    )
    tx = fg.optimizers.diloco(inner, outer.ours, EVERY, fg.AllReduce(), fg.NoMemory())
    named = experiment.server_model.state_dict()
    start = [jnp.array(value.numpy()) for value in named.values()]

    def stacked(leaf: jax.Array) -> jax.Array:
        return jnp.stack([leaf] * WORKERS)

    # What all workers have in common is not stacked: so only steps that are due exchange.
    specs = fg.state_specs(jax.eval_shape(tx.init, start), AXIS)
    axes = jax.tree.map(lambda spec: 0 if spec else None, specs)
    params = jax.tree.map(stacked, start)
    state = jax.tree.map(lambda leaf, spec: stacked(leaf) if spec else leaf, tx.init(start), specs)

    def predicted(params: list[jax.Array], x: jax.Array) -> jax.Array:
        w, b, v, c = params
        return jax.nn.relu(x @ w.T + b) @ v.T + c

    def loss(params: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(predicted(params, x), y).mean()

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        moves, state = tx.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, moves), state

    whole = jax.vmap(step, in_axes=(0, axes, 0, 0), out_axes=(0, axes), axis_name=AXIS)
    run = jax.jit(whole, donate_argnums=(0, 1))
    tested = experiment.eval_data_loader.dataset
    pieces = [
        (jnp.asarray(tested.X[i : i + 1000].numpy()), jnp.asarray(tested.Y[i : i + 1000].numpy()))
        for i in range(0, len(tested), 1000)
    ]
    test = jax.jit(loss)

    def tell(state: Any) -> float:
        return float(np.mean([float(test(state.anchor, x, y)) for x, y in pieces]))

    found = [tell(state)]
    for number in range(phases * EVERY):
        x, y = batch(experiment, number)
        params, state = run(params, state, x, y)
        if (number + 1) % EVERY == 0:
            found.append(tell(state))
    return found


def batch(experiment: Any, number: int) -> tuple[jax.Array, jax.Array]:
    """The batches of all workers in a step: each has the data of one shard."""
    at = [own[number * BATCH : (number + 1) * BATCH] for own in experiment.train_indices]
    pairs = list(zip(experiment.datasets, at, strict=True))
    x = np.stack([data.X[i].numpy() for data, i in pairs])
    y = np.stack([data.Y[i].numpy() for data, i in pairs])
    return jnp.asarray(x), jnp.asarray(y)


def farthest(ours: list[float], theirs: list[float]) -> float:
    """The largest difference of two curves, relative to the loss."""
    pairs = zip(ours, theirs, strict=True)
    return max(abs(own - other) / other for own, other in pairs)


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for the losses of runs of theirs, and for those that they printed."""
    names = defined(checkout)
    experiments = names["SyncExperiment"]
    for outer in (PLAIN, NESTEROV)[: 1 if smoke else None]:
        options = {"model_hidden_size": HIDDEN, "total_phases": PHASES, "eval_every": 1}
        experiment = experiments(**options, **outer.theirs)
        own = losses(experiment, outer)
        kept = losses(experiment, outer, renew=False)
        experiment.run()
        theirs = [loss for _, loss, _, _ in experiment.stats]
        words = f"{HIDDEN} hidden values, {WORKERS} workers, {PHASES} phases, outer {outer.words}"
        yield Row(
            "`SyncExperiment`, the losses",
            "`diloco`",
            words,
            farthest(own, theirs),
            differs="a new AdamW in each phase there: ours was given one that forgets",
        )
        yield Row(
            "the same",
            "`diloco` as it is",
            words,
            farthest(kept, theirs),
            limit=None,
            differs="the moments of AdamW are kept here",
        )
