"""Tasks that no setting of this project was chosen on: each row runs on them once.

They differ from those of `tasks.py` in their data, widths, depths and batches. The data come with
packages that the tests need anyway.
"""

import functools
import importlib
import unicodedata
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tasks import (
    Batch,
    Draw,
    Params,
    Task,
    language_model,
    source_of,
    train_lm,
)

# Data


def names() -> tuple[Any, Any]:
    """The names of Unicode's characters in a random order, without the long series."""
    found = (unicodedata.name(chr(code), "") for code in range(0x110000))
    kept = [name for name in found if name and not name.startswith(("CJK", "HANGUL S", "TANGUT I"))]
    order = np.random.default_rng(0).permutation(len(kept))
    lines = [kept[i].encode() for i in order]
    parts = lines[len(lines) // 10 :], lines[: len(lines) // 10]
    train, held_out = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    return train, held_out


def photographs(size: int = 16, levels: int = 16) -> tuple[Draw, Batch]:
    """Squares of two photographs without the pixels in their middle, whose brightness is asked.

    The last fifth of each photograph is held out.
    """
    load: Any = importlib.import_module("sklearn.datasets").load_sample_images
    views = [
        np.lib.stride_tricks.sliding_window_view(image, (size, size), (0, 1))
        for image in load().images
    ]
    border, middle = 4 * views[0].shape[1] // 5, slice(size // 2 - 1, size // 2 + 1)

    def squares(rng: np.random.Generator, count: int, low: int, high: int) -> Batch:
        which = rng.integers(0, len(views), count)
        rows, columns = rng.integers(0, views[0].shape[0], count), rng.integers(low, high, count)
        found = [views[i][r, c] for i, r, c in zip(which, rows, columns, strict=True)]
        pixels = np.stack(found).transpose(0, 2, 3, 1).astype(np.float32)
        asked = pixels[:, middle, middle].mean((1, 2, 3)) * levels / 256
        pixels[:, middle, middle] = 128
        return pixels / 128 - 1, asked.astype(np.int32)

    def draw(rng: np.random.Generator, count: int) -> Batch:
        return squares(rng, count, 0, border - size)

    held_out = squares(np.random.default_rng(1), 2000, border, views[0].shape[1])
    return draw, held_out


# Models


class Convolutions(nn.Module):
    """Convolutions and pooling, and two layers behind them, without normalization."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, 16, 16, 3) -> (B, 16)."""
        for scale in (1, 2, 4):
            x = nn.relu(nn.Conv(scale * self.width, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(8 * self.width)(x.reshape(x.shape[0], -1)))
        return nn.Dense(16)(x)


class Mixed(nnx.Module):
    """A gated recurrent language model over bytes, of Flax NNX, which computes in bfloat16."""

    def __init__(self, width: int, layers: int, rngs: nnx.Rngs) -> None:
        half: Any = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.embed = nnx.Embed(256, width, **half)
        self.gates = nnx.List([nnx.Linear(width, 3 * width, **half) for _ in range(layers)])
        self.up = nnx.List([nnx.Linear(width, 3 * width, **half) for _ in range(layers)])
        self.down = nnx.List([nnx.Linear(3 * width, width, **half) for _ in range(layers)])
        self.norms = nnx.List([nnx.RMSNorm(width, **half) for _ in range(2 * layers + 1)])
        self.out = nnx.Linear(width, 256, **half)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(B, T) -> (B, T, 256)."""
        x = self.embed(tokens)
        for i, (gates, up, down) in enumerate(zip(self.gates, self.up, self.down, strict=True)):
            forget, value, out = jnp.split(gates(self.norms[2 * i](x)), 3, -1)
            x = x + nn.silu(out) * averaged(nn.sigmoid(forget), value)
            x = x + down(nn.gelu(up(self.norms[2 * i + 1](x))))
        return self.out(self.norms[-1](x)).astype(jnp.float32)


def averaged(forget: jax.Array, value: jax.Array) -> jax.Array:
    """A moving average along the second axis, each step with its own decay."""

    def joined(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    decay, new = forget.astype(jnp.float32), ((1 - forget) * value).astype(jnp.float32)
    return jax.lax.associative_scan(joined, (decay, new), axis=1)[1].astype(value.dtype)


class Functional:
    """A model of Flax NNX as the pair of functions that a task wants."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module]) -> None:
        self.make = make
        self.graph = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))[0]

    def init(self, key: jax.Array, x: jax.Array) -> Params:
        """The first parameters, as nested dicts."""
        del x
        return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(key))))

    def apply(self, params: Params, x: jax.Array) -> Any:
        """What the model makes of a batch."""
        state = nnx.split(nnx.eval_shape(lambda: self.make(nnx.Rngs(0))))[1]
        nnx.replace_by_pure_dict(state, params)
        model: Any = nnx.merge(self.graph, state)
        return model(x)


class FineTuning(Task):
    """A task that begins where a dense run on other data ended, and has little data of its own."""

    def params(self, seed: int) -> Params:
        """The same for all seeds."""
        del seed
        return self._trained

    @functools.cached_property
    def _trained(self) -> Params:
        smoke = self.held_out[0][0].shape[1] < 32
        before = language_model("before", 8e-3, train_lm.corpus(), (48, 64, 3, 2), smoke)
        steps, rng = 2 if smoke else 600, np.random.default_rng(17)
        tx = optax.adam(before.schedule(before.rate, steps), b2=0.99)

        @jax.jit
        def step(params: Params, state: Any, batch: Batch) -> tuple[Params, Any]:
            updates, state = tx.update(jax.grad(before.loss)(params, batch), state)
            return optax.apply_updates(params, updates), state

        params = before.params(0)
        state = tx.init(params)
        for _ in range(steps):
            params, state = step(params, state, before.draw(rng, 32))
        return params


# Tasks


def _photographs(smoke: bool) -> Task:
    draw, (images, levels) = photographs()
    test, batch = (images[:8], levels[:8]) if smoke else (images, levels), 2 if smoke else 8
    return Task("photographs", Convolutions(4 if smoke else 24), 2e-3, batch, draw, (test,))


HELD_OUT: dict[str, Callable[[bool], Task]] = {
    "photographs": _photographs,
    "names": lambda smoke: language_model("names", 8e-3, names(), (32, 48, 4, 4), smoke),
    "nnx": lambda smoke: language_model(
        "nnx",
        4e-3,
        source_of("scipy"),
        (64, 80, 2, 3),
        smoke,
        model=lambda width, layers: Functional(lambda rngs: Mixed(width, layers, rngs)),
    ),
    "fine-tuning": lambda smoke: language_model(
        "fine-tuning", 5e-4, source_of("numpy", 100_000), (48, 64, 3, 2), smoke, kind=FineTuning
    ),
}
"""By name; smaller ones with `True`."""
