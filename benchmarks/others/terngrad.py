"""TernGrad by its authors, whose program of TensorFlow 1 runs with NumPy in its place."""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from others._both import Row, apart, both_ways, draws, imported, of_magnitudes

import fftgrad as fg

REPOSITORY = "wenwei202/terngrad"
LICENSE = "Apache-2.0"
SIZES = (600, 4096)


class Tensor(np.ndarray):
    """An array that has a tensor's method."""

    def get_shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.shape


def tensorflow(uniform: np.ndarray) -> Any:
    """What of TensorFlow the two functions use, by NumPy; it draws these numbers."""
    tf = mock.MagicMock()
    tf.IndexedSlices = tuple
    tf.app.flags.FLAGS.size_to_binarize = 1
    names = ("abs", "sign", "zeros", "where", "sqrt", "square", "less", "size")
    for name in names:
        setattr(tf, name, getattr(np, name))
    tf.reduce_mean, tf.reduce_max, tf.clip_by_value = np.mean, np.max, np.clip
    tf.cond = lambda condition, yes, no: yes() if condition else no()
    tf.random_uniform = lambda _, low, high: low + (high - low) * uniform
    return tf


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """A row for each size, clipped and not."""
    for n in SIZES[: 1 if smoke else None]:
        for clip in (None, 2.5):
            key = jax.random.key(n)
            x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
            x -= x.mean()
            uniform = of_magnitudes(draws(key, n), x)
            with mock.patch.dict(sys.modules, {"tensorflow": tensorflow(uniform)}):
                sys.modules.pop("bingrad_common", None)
                module = imported(checkout / "terngrad/inception", "bingrad_common")
            given = [(x.view(Tensor), None)]
            scales = [scale for scale, _ in module.gradient_binarizing_scalers(given, clip or 0.0)]
            if clip:
                given = module.clip_gradients_by_stddev(given, clip)
            ((expected, _),) = module.stochastical_binarize_gradients(given, scales)
            found = both_ways(fg.codecs.Ternary(clip=clip), x, fg.Step(0, key, key))
            yield Row(
                "`stochastical_binarize_gradients`",
                f"`Ternary(clip={clip})`",
                f"{n} normal values of mean zero, our uniform numbers",
                apart(found, np.asarray(expected)),
                differs="σ is the deviation from the mean there, from zero here" if clip else "",
            )
