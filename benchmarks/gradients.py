"""Train the main job on the batches of eight workers, and save a gradient: `data/gradient.npy`.

A real gradient has what synthetic noise lacks: layers of very different scale, heavy tails, rows
that are exactly zero.
"""

import jax
import numpy as np
import optax
from _record import DATA, parser
from tasks import Task, constant, language_model, train_lm, trained

SAVED = DATA / "gradient.npy"
"""Of the main job, half-way through a dense run."""


def gradient(task: Task, steps: int, workers: int) -> np.ndarray:
    """The gradient of one worker after some steps of Adam on the batches of all."""
    rng = np.random.default_rng(0)
    tx = optax.adam(task.rate, b2=0.99)
    params = trained(task, task.params(0), tx, steps, workers * task.batch, rng)
    last = jax.jit(jax.grad(task.loss))(params, task.draw(rng, task.batch))
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(last)])


def main_job(smoke: bool) -> Task:
    """The language model of `examples/train_lm.py`, of 283,104 parameters."""
    args = train_lm.parse_args(["--smoke"] if smoke else [])
    sizes = args.context, args.width, args.layers, args.batch
    return language_model("job", args.lr, train_lm.corpus(), sizes, False, constant, (1, 1))


def main() -> None:
    """Trains, and writes gradient.npy."""
    args = parser(__doc__, "../data", steps=(90, "optimizer steps before it")).parse_args()
    values = gradient(main_job(args.smoke), 3 if args.smoke else args.steps, workers=8)
    args.out.mkdir(parents=True, exist_ok=True)
    np.save(args.out / SAVED.name, values)
    print(f"{values.size:,} values, norm {np.linalg.norm(values):.4f}")


if __name__ == "__main__":
    main()
