"""Gradients of real models in one vector; run as a program, it saves the one of `codecs.py`.

A gradient has what synthetic noise lacks: layers of very different scale, heavy tails, rows that
are exactly zero.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
import optax
from _record import DATA, parser
from tasks import ResNet, Task, constant, digits, images_of, language_model, train_lm

SAVED = DATA / "gradient.npy"
"""That of the main job, half-way through a dense run."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient in one vector."""

    name: str
    values: np.ndarray
    # of each leaf, in order, how many values it has and whether it is of the last layer
    layers: list[tuple[int, bool]]


def layers(task: Task) -> list[tuple[int, bool]]:
    """The leaves of a model, in the order of its gradient's."""
    found = jax.tree.leaves_with_path(jax.eval_shape(lambda: task.params(0)))
    # In these models the last layer is the only one that hangs from the root by this name.
    return [
        (math.prod(leaf.shape), jax.tree_util.keystr(path).startswith("['params']['Dense_0']"))
        for path, leaf in found
    ]


def trained(task: Task, steps: int, workers: int = 1) -> np.ndarray:
    """The gradient of one worker after some steps of Adam on the batches of all."""
    tx = optax.adam(task.rate, b2=0.99)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(task.loss)(params, batch), state)
        return optax.apply_updates(params, updates), state

    params, rng = task.params(0), np.random.default_rng(0)
    state = tx.init(params)
    for _ in itertools.repeat(None, steps):
        params, state = step(params, state, task.draw(rng, workers * task.batch))
    last = jax.jit(jax.grad(task.loss))(params, task.draw(rng, task.batch))
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(last)])


def small_source(smoke: bool) -> Task:
    """A byte-level language model of 3.3 million parameters."""
    sizes = (64, 32, 1, 8) if smoke else (64, 256, 4, 8)
    return language_model("lm", 2e-3, train_lm.corpus(), sizes, (1, 1), constant)


def convolutions(smoke: bool) -> Task:
    """A convolutional network of 2.8 million parameters on all of the digits."""
    (images, labels), (more, others) = digits()
    both = np.concatenate([images, more]), np.concatenate([labels, others])
    model = ResNet(1, 4, pre=True) if smoke else ResNet(2, 64, pre=True)
    return Task("conv", model, True, 1e-3, 32, images_of(both), (both,), schedule=constant)


def main_job(smoke: bool) -> Task:
    """The language model of `examples/train_lm.py`, of 283,104 parameters."""
    args = train_lm.parse_args(["--smoke"] if smoke else [])
    sizes = args.context, args.width, args.layers, args.batch
    return language_model("job", args.lr, train_lm.corpus(), sizes, (1, 1), constant)


def main() -> None:
    """Trains the main job on the batches of eight workers, and writes gradient.npy."""
    args = parser(__doc__, "../data", steps=(90, "optimizer steps before it")).parse_args()
    values = trained(main_job(args.smoke), 3 if args.smoke else args.steps, workers=8)
    args.out.mkdir(parents=True, exist_ok=True)
    np.save(args.out / SAVED.name, values)
    print(f"{values.size:,} values, norm {np.linalg.norm(values):.4f}")


if __name__ == "__main__":
    main()
