"""Oracle of learned codes in NumPy, float64, written from the equations.

Gradients are central differences, so that no rule of differentiation is written twice.
"""

import math

import jax
import ml_dtypes
import numpy as np
from reference import largest

STEP = 1e-8
"""Of differences: a longer one crosses the kink of some ReLU now and then."""


def leaky(x):
    return np.where(x > 0, x, 0.01 * x)


def conv(x, layer, stride=1):
    """y[j] = b + Σ_t x[stride · j + t] K[t], zeros behind the end."""
    kernel, bias = layer["kernel"], layer["bias"]
    padded = np.concatenate([x, np.zeros((len(kernel), x.shape[1]))])
    return np.stack(
        [
            bias + sum(padded[stride * j + t] @ kernel[t] for t in range(len(kernel)))
            for j in range(len(x) // stride)
        ]
    )


def transposed(x, layer):
    """y[j] = b + Σ x[i] K[t] over the i and t with 2 i = j + t - 2."""
    kernel, bias = layer["kernel"], layer["bias"]
    out = np.tile(bias, (2 * len(x), 1))
    for i in range(len(x)):
        for t in range(3):
            j = 2 * i - t + 2
            if 0 <= j < len(out):
                out[j] = out[j] + x[i] @ kernel[t]
    return out


def encode(params, values):
    layers = params["encoder"]
    count = len(layers) - 1
    length = 2**count * math.ceil(len(values) / 2**count)
    x = np.concatenate([values, np.zeros(length - len(values))])[:, None]
    for i in range(count):
        x = leaky(conv(x, layers[f"Conv_{i}"], 2))
    return conv(x, layers[f"Conv_{count}"])


def decode(params, code, innovation):
    layers = params["decoder"]
    x = code
    for i in range(len(layers) - 1):
        x = leaky(transposed(x, layers[f"ConvTranspose_{i}"]))
    filled = np.concatenate([innovation, np.zeros(len(x) - len(innovation))])
    return conv(np.concatenate([x, filled[:, None]], axis=1), layers["out"])[: len(innovation), 0]


def units(values):
    """The root mean square, and the values over it."""
    size = np.sqrt(np.mean(np.square(values)))
    return size, values / size if size else values


def lacking(params, code, row, m):
    return largest(row - decode(params, code, np.zeros(len(row))), m)


def loss(params, values, lead, m, innovations):
    """Of m None the mean's; the innovations are those of the parameters before a step."""
    sizes, rows = zip(*map(units, values), strict=True)
    weights = np.array([size > 0 for size in sizes] if m else sizes, np.float64)
    weights /= weights.sum()
    codes = [encode(params, row) for row in rows]
    center = sum(p * code for p, code in zip(weights, codes, strict=True))
    apart = sum(p * np.mean((code - center) ** 2) for p, code in zip(weights, codes, strict=True))
    if m:
        found = [decode(params, codes[lead], i) for i in innovations]
        pairs = list(zip(weights, found, rows, strict=True))
    else:
        wanted = sum(p * row for p, row in zip(weights, rows, strict=True))
        pairs = [(1.0, decode(params, center, np.zeros(len(wanted))), wanted)]
    wrong = sum(p * np.mean((found - row) ** 2) for p, found, row in pairs)
    energy = sum(p * np.mean(row**2) for p, _, row in pairs)
    return 0.5 * wrong + 0.5 * apart, math.sqrt(wrong / energy)


def learned(params, values, lead, m, rate):
    """The error, once the parameters, in place, have made a step."""
    innovations = None
    if m:
        rows = [units(v)[1] for v in values]
        code = encode(params, rows[lead])
        innovations = [lacking(params, code, row, m) for row in rows]

    def total():
        return loss(params, values, lead, m, innovations)[0]

    error = loss(params, values, lead, m, innovations)[1]
    slopes = []
    for leaf in jax.tree.leaves(params):
        slope = np.zeros_like(leaf)
        for place in np.ndindex(leaf.shape):
            before = leaf[place]
            leaf[place] = before + STEP
            up = total()
            leaf[place] = before - STEP
            slope[place] = (up - total()) / (2 * STEP)
            leaf[place] = before
        slopes.append(slope)
    length = math.sqrt(sum(np.sum(slope**2) for slope in slopes))
    for leaf, slope in zip(jax.tree.leaves(params), slopes, strict=True):
        leaf -= rate * slope / max(1.0, length)
    return error


def gain(size, wanted, found):
    return size * max(0.0, wanted @ found / (found @ found))


class LearnedCodes:
    """Vectors by name on each worker, of which some travel dense."""

    def __init__(self, params, until, leading, fraction, dense, innovation, rate):
        self.params, self.until, self.leading = params, until, leading
        self.fraction, self.dense, self.innovation = fraction, dense, innovation
        self.rate, self.step, self.error = rate, 0, 1.0

    def __call__(self, rows):
        """The mean, and what was sent of each worker."""
        workers, names = len(rows), [n for n in rows[0] if n not in self.dense]
        lead = self.step % workers
        kept = {n: math.ceil(self.fraction * rows[0][n].size) for n in names}
        where = {n: np.flatnonzero(largest(rows[lead][n], kept[n])) for n in names}
        values = [np.concatenate([row[n][where[n]] for n in names]) for row in rows]
        m = math.ceil(self.innovation * sum(rows[0][n].size for n in names))
        if self.step < self.until:
            sent = values
            self.error = learned(self.params, values, lead, m * self.leading, self.rate)
            mean = sum(sent) / workers
        elif self.leading:
            sent = self.led(values, lead, m)
            mean = sum(sent) / workers
        else:
            mean, sent = self.summed(values)
        self.step += 1

        def whole(found, row):
            out = {n: row[n] for n in self.dense}
            start = 0
            for n in names:
                out[n] = np.zeros(rows[0][n].shape)
                out[n][where[n]] = found[start : start + kept[n]]
                start += kept[n]
            return out

        average = {n: sum(row[n] for row in rows) / workers for n in self.dense}
        return whole(mean, average), [whole(s, row) for s, row in zip(sent, rows, strict=True)]

    def led(self, values, lead, m):
        code = encode(self.params, units(values[lead])[1])
        code = code.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        sent = []
        for v in values:
            size, row = units(v)
            found = decode(self.params, code, lacking(self.params, code, row, m))
            sent.append(gain(size, row, found) * found)
        return sent

    def summed(self, values):
        nothing = np.zeros(len(values[0]))
        pairs = [units(v) for v in values]
        codes = [encode(self.params, row) for _, row in pairs]
        gains = [
            gain(size, row, decode(self.params, code, nothing))
            for (size, row), code in zip(pairs, codes, strict=True)
        ]
        total = sum(gains)
        center = sum(g * code for g, code in zip(gains, codes, strict=True)) / total
        common = decode(self.params, center, nothing)
        mean = total / len(values) * common

        def slope(along):
            ahead = decode(self.params, center + STEP * along, nothing)
            return (ahead - decode(self.params, center - STEP * along, nothing)) / (2 * STEP)

        sent = [g * (common + slope(code - center)) for g, code in zip(gains, codes, strict=True)]
        return mean, sent
