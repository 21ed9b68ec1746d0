"""SparseLoCo: local steps, two bits of the largest of each tile, lengths clipped at the median."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import SLOW, sample
from parallel import AXIS, MODES
from stepwise import run

import fftgrad as fg
from fftgrad.methods._recipes import LargestOfTiles

WORKERS, RATE, EVERY = 4, 0.1, 3
SHAPES = {"w": (37, 66), "kernel": (3, 5, 9), "b": (150,), "scale": ()}
BY_LEAF = fg.Bucketing("leaf")
RULE = LargestOfTiles(fg.codecs.Tiles, 64, 64, fg.codecs.BinMeans(2))


def gradients(steps, seed=0):
    """Of each step, for each worker; that of worker 1 is three times as long."""
    rng = np.random.default_rng(seed)
    size = np.array([1, 3, 1, 1])
    return {
        k: (rng.standard_t(4, (steps, WORKERS, *s)) * size.reshape(-1, *[1] * len(s))).astype("f4")
        for k, s in SHAPES.items()
    }


# The oracle: one leaf of one worker at a time, float64, from the paper's equations.


def tiles_of(shape, block):
    """The flat positions in each tile, in its order; -1 where a tile hangs over the edge."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1] if shape else 1
    side = [n if n == 1 else min(block, 1 << max(1, (n - 1).bit_length())) for n in (rows, columns)]
    down, across = -(-rows // side[0]), -(-columns // side[1])
    at = np.full((down * side[0], across * side[1]), -1)
    at[:rows, :columns] = np.arange(rows * columns).reshape(rows, columns)
    for i in range(down):
        for j in range(across):
            tile = at[i * side[0] : (i + 1) * side[0], j * side[1] : (j + 1) * side[1]]
            yield np.pad(tile.ravel(), (0, max(0, 2 - tile.size)), constant_values=-1)


def chosen(x, shape, block, k):
    """Of each tile the positions of the k largest, with those that hang over."""
    out = []
    for tile in tiles_of(shape, block):
        magnitudes = np.where(tile < 0, 0, np.abs(x[tile]))
        out.append(tile[np.sort(np.argsort(-magnitudes, kind="stable")[:k])])
    return np.concatenate(out)


def two_bits(v):
    """What 4 bins around the mean, 6 standard deviations wide, make of the values."""
    centred = v - v.mean()
    width = 6 * centred.std() / 4
    places = np.round(centred / (width or 1) + 2)
    codes = np.clip(places, 0, 3)
    return sum(np.where(codes == c, v[codes == c].mean(), 0) for c in np.unique(codes))


class Oracle:
    def __init__(self, k, block, decay, outer_rate):
        self.k, self.block, self.decay, self.outer_rate = k, block, decay, outer_rate
        self.anchor = {name: np.zeros(int(np.prod(s))) for name, s in SHAPES.items()}
        self.own = {name: [a.copy() for _ in range(WORKERS)] for name, a in self.anchor.items()}
        self.left = {name: [a.copy() for _ in range(WORKERS)] for name, a in self.anchor.items()}

    def descend(self, grads):
        for name, rows in grads.items():
            for w in range(WORKERS):
                self.own[name][w] -= RATE * rows[w].ravel().astype(np.float64)

    def meet(self):
        for name, shape in SHAPES.items():
            sent = []
            for w in range(WORKERS):
                e = self.decay * self.left[name][w] + self.anchor[name] - self.own[name][w]
                at = chosen(e, shape, self.block, self.k)
                values = two_bits(np.where(at < 0, 0, e[at]))
                q = np.zeros(e.size)
                q[at[at >= 0]] = values[at >= 0]
                self.left[name][w] = e - q
                sent.append(q)
            lengths = [np.linalg.norm(q) for q in sent]
            assert min(lengths) > 0
            factors = np.minimum(1, np.median(lengths) / np.array(lengths))
            self.anchor[name] -= self.outer_rate * np.mean(factors[:, None] * sent, axis=0)
            self.own[name] = [self.anchor[name].copy() for _ in range(WORKERS)]


ZEROS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("mode", sample(MODES, lambda mode: {mode == "vmap"}))
@pytest.mark.parametrize(("k", "block"), [pytest.param(64, 64, marks=SLOW), (5, 16)])
def test_it_is_the_paper(k, block, mode):
    """Of two meetings; at the third, values on the edge of a bin may go either way."""
    sizes = {} if k == block == 64 else {"k": k, "block": block}  # the paper's, unless told
    tx = fg.optimizers.sparse_loco(optax.sgd(RATE), sync_every=EVERY, **sizes)
    grads, oracle = gradients(2 * EVERY), Oracle(k, block, 0.95, 0.4)
    params, state = jax.tree.map(lambda a: a[-1], run(tx, grads, ZEROS, mode))
    for i in range(2 * EVERY):
        oracle.descend({name: g[i] for name, g in grads.items()})
        if (i + 1) % EVERY == 0:
            oracle.meet()
    for name, shape in SHAPES.items():
        for row in state.anchor[name]:
            np.testing.assert_array_equal(row, state.anchor[name][0])
        found, expected = np.ravel(state.anchor[name][0]), oracle.anchor[name]
        alike = np.isclose(found, expected, rtol=1e-3, atol=1e-5)
        assert alike.mean() >= 0.998, (name, alike.mean())
        assert np.any(expected)
        for w in range(WORKERS):
            left = np.ravel(state.pmean[0].memory.worker_rows.residual[name][w])
            alike = np.isclose(left, oracle.left[name][w], rtol=1e-3, atol=1e-4)
            assert alike.mean() >= 0.998, (name, alike.mean())
        np.testing.assert_allclose(params[name][2].ravel(), found, atol=1e-6)
        assert params[name].shape == (WORKERS, *shape)


@pytest.mark.full
def test_what_else_it_takes_is_local_steps_own():
    """A delay, a blend, no clipping, and meetings 30 steps apart."""
    more = {"overlap_steps": 1, "mixing": 0.5, "allow_masked": True, "axis_name": AXIS}
    plain = {"clip_to_median": False, **more}
    mine = fg.optimizers.sparse_loco(optax.sgd(RATE), sync_every=EVERY, **plain)
    parts = (fg.AllGather(RULE), fg.ErrorFeedback(0.95))
    theirs = fg.optimizers.diloco(optax.sgd(RATE), optax.sgd(0.4), EVERY, *parts, **more)
    grads = gradients(2 * EVERY)
    (found, _), (expected, _) = (run(tx, grads, ZEROS) for tx in (mine, theirs))
    for name in SHAPES:
        np.testing.assert_array_equal(found[name], expected[name])
    assert inspect.signature(fg.optimizers.sparse_loco).parameters["sync_every"].default == 30


def test_it_sends_205_times_less_than_float32_and_10_bits_a_value():
    """Where 12 bits of position and 2 of value make 146 times less."""
    exchange = fg.AllGather(RULE, clip_to_median=True)
    big = {"w": jax.ShapeDtypeStruct((8192, 28672), jnp.float32)}  # of a model of 72 B
    sent = fg.wire_bytes(exchange, big, BY_LEAF)
    kept = big["w"].size // 64
    assert 8 * sent / kept == pytest.approx(10, abs=1e-4)
    assert 4 * big["w"].size / sent >= 204.79
    assert 4 * big["w"].size / (kept * 14 / 8) == pytest.approx(146.3, abs=0.1)
