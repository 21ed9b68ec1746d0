"""Save a gradient of the main job's model, half-way through a dense run, for codecs.py to time on.

A gradient has what synthetic noise lacks: layers of very different scale, heavy tails, rows that
are exactly zero.
"""

import argparse
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_lm  # noqa: E402  (after the path)


def main() -> None:
    """Trains on one device, and writes gradient.npy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=90, help="optimizer steps before it")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/data")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    own = parser.parse_args()
    args = train_lm.parse_args(["--smoke"] if own.smoke else [])
    steps = args.steps if own.smoke else own.steps

    text, _ = train_lm.corpus()
    rng = np.random.default_rng(args.seed)
    model = train_lm.ByteLM(args.width, args.layers)
    params = model.init(jax.random.key(args.seed), jnp.zeros((1, args.context), jnp.int32))
    tx = optax.adam(args.lr, b2=0.99)
    trainer = train_lm.Trainer(args, jax.make_mesh((1,), ("data",)), model, params)

    @jax.jit
    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(trainer.loss)(params, batch), state)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        batch = train_lm.sample(rng, text, 8 * args.batch, args.context)
        params, state = step(params, state, jnp.asarray(batch))
    batch = train_lm.sample(rng, text, args.batch, args.context)
    gradient = jax.tree.leaves(jax.jit(jax.grad(trainer.loss))(params, jnp.asarray(batch)))
    own.out.mkdir(parents=True, exist_ok=True)
    vector = np.concatenate([np.ravel(leaf) for leaf in gradient])
    np.save(own.out / "gradient.npy", vector)
    print(f"{vector.size:,} values, norm {np.linalg.norm(vector):.4f}")


if __name__ == "__main__":
    main()
