"""What is trained: three models, their data, and the optimizer that people use for each.

A workload is the same for every method and both frameworks: the same first parameters, the same
batches in the same order for each worker, the same held-out data.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_lm
from models import ResNet

Params = Any
Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its data and its optimizer.

    Attributes:
      model: the Flax module, from inputs to logits; `peer.py` has its twin.
      rate: the peak of the learning rate, of SGD with momentum 0.9 or, if `adam`, of Adam.
      batch: examples per worker and step.
      metric: what is assessed on held-out data, "loss" (falls) or "accuracy" (rises).
      draw: `count` random examples to train on.
      held_out: examples to assess on.
    """

    name: str
    model: nn.Module
    adam: bool
    rate: float
    batch: int
    metric: str
    draw: Callable[[np.random.Generator, int], Batch]
    held_out: Batch

    def params(self, seed: int) -> Params:
        """The first parameters."""
        init = jax.jit(self.model.init)
        return init(jax.random.key(seed), jnp.asarray(self.held_out[0][:1]))

    def loss(self, params: Params, inputs: Any, labels: Any) -> jax.Array:
        """Mean cross-entropy in nats."""
        logits: Any = self.model.apply(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def assess(self, params: Params, inputs: Any, labels: Any) -> jax.Array:
        """The held-out metric."""
        if self.metric == "loss":
            return self.loss(params, inputs, labels)
        logits: Any = self.model.apply(params, inputs)
        return (logits.argmax(-1) == labels).mean()

    def batches(self, worker: int, seed: int) -> Iterator[Batch]:
        """One worker's batches."""
        rng = np.random.default_rng((seed, worker))
        while True:
            yield self.draw(rng, self.batch)

    @property
    def schedule(self) -> optax.Schedule:
        """A rise over ten steps, and then constant, so that a loss does not wait for the end."""
        return optax.linear_schedule(self.rate / 10, self.rate, 9)


def save_params(params: Params, path: str) -> None:
    """Parameters as a NumPy archive, by path."""
    leaves = jax.tree.leaves_with_path(params)
    named: dict[str, Any] = {
        jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in leaves
    }
    np.savez(path, **named)


def load_params(path: str) -> Params:
    """The inverse, as nested dicts."""
    params: Params = {}
    with np.load(path) as archive:
        for name in archive.files:
            *parents, last = name.split("/")
            node = params
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = archive[name]
    return params


class AlexNet(nn.Module):
    """Krizhevsky's one-weird-trick variant of AlexNet: 61 million parameters at full width."""

    width: int = 64
    hidden: int = 4096
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, 224, 224, 1) -> (B, 1000)
        c = self.width
        pool = functools.partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2))
        x = pool(nn.relu(nn.Conv(c, (11, 11), 4, padding=2)(x)))
        x = pool(nn.relu(nn.Conv(3 * c, (5, 5), padding=2)(x)))
        x = nn.relu(nn.Conv(6 * c, (3, 3), padding=1)(x))
        x = nn.relu(nn.Conv(4 * c, (3, 3), padding=1)(x))
        x = pool(nn.relu(nn.Conv(4 * c, (3, 3), padding=1)(x)))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.classes)(x)


def digits(size: int) -> tuple[Batch, Batch]:
    """scikit-learn's digits, blown up to `size`: 1,437 images to train on and 360 held out."""
    data: Any = importlib.import_module("sklearn.datasets").load_digits()
    images = (data.images[..., None] / 8 - 1).astype(np.float32)
    labels = data.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    images = images.repeat(size // 8, 1).repeat(size // 8, 2)
    train, test = order[360:], order[:360]
    return (images[train], labels[train]), (images[test], labels[test])


def _images(examples: Batch) -> Callable[[np.random.Generator, int], Batch]:
    def draw(rng: np.random.Generator, count: int) -> Batch:
        chosen = rng.choice(len(examples[1]), count, replace=False)
        return examples[0][chosen], examples[1][chosen]

    return draw


def alexnet(smoke: bool) -> Workload:
    """The paper's 250 MB of gradient, and little to compute for it: 2 images per worker."""
    train, (images, labels) = digits(64 if smoke else 224)
    model = AlexNet(width=4, hidden=64) if smoke else AlexNet()
    held_out = images[:32], labels[:32]
    return Workload("alexnet", model, False, 0.01, 2, "loss", _images(train), held_out)


def resnet(smoke: bool) -> Workload:
    """Half a million parameters that take long to compute: compression has little to win here."""
    train, held_out = digits(8)
    model = ResNet(1, 8) if smoke else ResNet(5)
    return Workload("resnet", model, False, 0.1, 16, "accuracy", _images(train), held_out)


def lm(smoke: bool) -> Workload:
    """A transformer of 10.1 million parameters on the source of Python's standard library."""
    context, width, layers = (16, 32, 1) if smoke else (128, 320, 8)
    train, text = train_lm.corpus()

    def draw(rng: np.random.Generator, count: int, text: Any = train) -> Batch:
        passages = train_lm.sample(rng, text, count, context)
        return passages[:, :-1], passages[:, 1:]

    model = train_lm.ByteLM(width, layers)
    held_out = draw(np.random.default_rng(1), 4 if smoke else 32, text)
    return Workload("lm", model, True, 1e-3, 2, "loss", draw, held_out)


WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "alexnet": alexnet,
    "resnet": resnet,
    "lm": lm,
}
