"""Local steps whose parameters meet in fragments, late, and blended."""

import jax
import numpy as np
import optax
import pytest
from cases import sample
from parallel import MODES, everywhere
from stepwise import run

import fftgrad as fg
from fftgrad.optimizers import _fragments

WORKERS = 4
DENSE = (fg.AllReduce(), fg.NoMemory())
SHAPES = {"w": (7, 3), "b": (4,), "kernel": (2, 3, 5), "scale": ()}
ZEROS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
RATE, OUTER, MOMENTUM = 0.1, 0.7, 0.9
NESTEROV = optax.sgd(OUTER, momentum=MOMENTUM, nesterov=True)
STREAMS = [(5, 1, 0, 0.0), (6, 3, 0, 0.0), (6, 2, 2, 0.5), (4, 4, 1, 0.25), (6, 1, 5, 0.5)]


def gradients(steps, seed=0):
    """Of each step, for each worker."""
    rng = np.random.default_rng(seed)
    shapes = {name: (steps, WORKERS, *shape) for name, shape in SHAPES.items()}
    return {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}


def at(grads, step):
    return {name: of_all[step] for name, of_all in grads.items()}


def until(grads, step):
    """The same with zeros from a step on."""
    zero = {name: np.zeros_like(of_all[step:]) for name, of_all in grads.items()}
    return {name: np.concatenate([grads[name][:step], zero[name]]) for name in grads}


def cut_of(shape, number, fragments):
    """The index of what of a leaf belongs to a fragment, and along which axis it is cut."""
    shape = shape or (1,)
    enough = [axis for axis, rows in enumerate(shape) if rows >= fragments]
    axis = enough[0] if enough else int(np.argmax(shape))
    each = -(-shape[axis] // fragments)
    first, last = (min(shape[axis], at * each) for at in (number, number + 1))
    return (slice(None),) * axis + (slice(first, last),), axis


class Oracle:
    """Streaming DiLoCo, float64, one leaf at a time: the paper's algorithm 2 by rows."""

    def __init__(self, every, fragments, delay, blend, weights=None):
        self.fragments, self.delay, self.blend = fragments, delay, blend
        self.period = every // fragments
        self.weights = np.ones(WORKERS) if weights is None else np.asarray(weights, float)
        self.own = {k: np.zeros((WORKERS, *(s or (1,)))) for k, s in SHAPES.items()}
        self.anchor = {k: np.zeros(s or (1,)) for k, s in SHAPES.items()}
        self.velocity = {k: np.zeros(s or (1,)) for k, s in SHAPES.items()}
        self.count, self.on_the_way = 0, {}

    def step(self, grads):
        if self.delay:  # what is late is sent beside the step that follows
            self._meet()
        for k in SHAPES:
            self.own[k] -= RATE * grads[k].reshape(self.own[k].shape)
        self.count += 1
        if not self.delay:
            self._meet()
        if self.count in self.on_the_way:
            self._receive(self.on_the_way.pop(self.count))

    def _meet(self):
        since = self.count - self.period
        if since >= 0 and since % self.period == 0:
            number = since // self.period % self.fragments
            self._send(number)
            self.on_the_way[self.count + self.delay] = number

    def _send(self, number):
        for k, shape in SHAPES.items():
            rows, _ = cut_of(shape, number, self.fragments)
            change = self.anchor[k][rows] - self.own[k][:, *rows]
            mean = np.tensordot(self.weights / self.weights.sum(), change, 1)
            self.velocity[k][rows] = MOMENTUM * self.velocity[k][rows] + mean
            self.anchor[k][rows] -= OUTER * (MOMENTUM * self.velocity[k][rows] + mean)

    def _receive(self, number):
        for k, shape in SHAPES.items():
            rows, _ = cut_of(shape, number, self.fragments)
            common = (1 - self.blend) * self.anchor[k][rows]
            self.own[k][:, *rows] = self.blend * self.own[k][:, *rows] + common


def end(tx, grads, mode="vmap", **extra):
    """The parameters of the workers and their states, after all steps."""
    return jax.tree.map(lambda a: a[-1], run(tx, grads, ZEROS, mode, **extra))


# The ways of running it differ in the collectives alone.
RUNS = [(stream, "vmap") for stream in STREAMS]
RUNS += [(STREAMS[2], mode) for mode in MODES if mode != "vmap"]


@pytest.mark.parametrize(("stream", "mode"), sample(RUNS, frozenset))
def test_it_is_the_paper(stream, mode):
    every, fragments, delay, blend = stream
    tx = fg.optimizers.diloco(
        optax.sgd(RATE),
        NESTEROV,
        every,
        *DENSE,
        fragments=fragments,
        overlap_steps=delay,
        mixing=blend,
    )
    grads, oracle = gradients(17), Oracle(*stream)
    params, state = end(tx, grads, mode)
    for i in range(17):
        oracle.step(at(grads, i))
    for k in SHAPES:
        expected = oracle.own[k].reshape(params[k].shape)
        np.testing.assert_allclose(params[k], expected, atol=1e-5)
        for row in state.anchor[k]:
            np.testing.assert_allclose(row, oracle.anchor[k].reshape(row.shape), atol=1e-5)


def fragment(params, fragments):
    """The shapes of one fragment."""
    return jax.eval_shape(lambda tree: _fragments.take(tree, np.int32(0), fragments), params)


def test_kernels_are_cut_where_they_are_long():
    """Cut along an axis of three, each of eight meetings would send a third."""
    shape = {"kernel": jax.ShapeDtypeStruct((3, 3, 64, 128), "float32")}
    cut = {8: (3, 3, 8, 128), 100: (3, 3, 64, 2), 3: (1, 3, 64, 128)}
    assert {n: fragment(shape, n)["kernel"].shape for n in cut} == cut


def test_gradients_may_be_narrower_than_parameters():
    tx = fg.optimizers.diloco(optax.sgd(RATE), optax.sgd(1.0), 2, *DENSE, fragments=2)
    narrow = jax.tree.map(lambda a: a.astype("bfloat16"), gradients(4))
    wide, _ = end(tx, jax.tree.map(lambda a: a.astype(np.float32), narrow))
    for k, own in end(tx, narrow)[0].items():
        assert own.dtype == np.float32
        np.testing.assert_allclose(own, wide[k], atol=5e-3)


def test_weights_are_those_of_the_mean():
    weights = np.array([3, 0, 1, 4], np.float32)
    tx = fg.optimizers.diloco(optax.sgd(RATE), NESTEROV, 4, *DENSE, fragments=2)
    grads, oracle = gradients(13), Oracle(4, 2, 0, 0.0, weights)
    params, _ = end(tx, grads, weight=np.tile(weights, (13, 1)))
    for i in range(13):
        oracle.step(at(grads, i))
    for k in SHAPES:
        np.testing.assert_allclose(params[k], oracle.own[k].reshape(params[k].shape), atol=1e-5)


@pytest.mark.parametrize("fragments", [2, 3, 6])
def test_nothing_is_lost_between_anchor_and_residuals(fragments):
    """Of plain descent by 1, anchor and residuals add up to all that the workers were told."""
    tx = fg.optimizers.diloco(
        optax.sgd(RATE), optax.sgd(1.0), 6,
        fg.AllGather(fg.chain(fg.TopK(fraction=0.2), fg.RangeFloat(bits=4))), fg.ErrorFeedback(),
        fragments=fragments,
    )  # fmt: skip
    grads = until(gradients(24), 18)
    params, state = end(tx, grads)
    for k, shape in SHAPES.items():
        anchor = state.anchor[k].astype(np.float64)
        assert len({row.tobytes() for row in state.anchor[k]}) == 1
        lost = np.zeros((WORKERS, *(shape or (1,))))
        for number, own in enumerate(state.pmean):
            rows, axis = cut_of(shape, number, fragments)
            residual = own.memory.worker_rows.residual[k][:, 0]
            residual = residual.reshape(WORKERS, *(residual.shape[1:] or (1,)))
            kept = rows[axis].stop - rows[axis].start
            others, mine = np.split(residual, [residual.shape[axis + 1] - kept], axis + 1)
            assert not others.any()
            lost[:, *rows] += mine
        told = -RATE * grads[k].astype(np.float64).sum(0).mean(0)
        since = params[k].astype(np.float64).mean(0) - anchor[0]
        left = lost.reshape(WORKERS, *shape).mean(0)
        np.testing.assert_allclose(anchor[0] - left + since, told, atol=2e-5)
        assert np.abs(lost).max() > 0.01 or not shape


@pytest.mark.full
def test_each_step_sends_as_much_and_in_no_branch():
    codec = fg.AllGather(fg.chain(fg.TopK(fraction=0.1), fg.RangeFloat(bits=4)))
    params = {"w": np.zeros((64, 30), np.float32), "b": np.zeros(64, np.float32)}
    rows, every = jax.tree.map(lambda a: np.stack([a] * WORKERS), params), 8
    for fragments, branch in ((8, ()), (4, (1,))):
        tx = fg.optimizers.diloco(
            optax.sgd(RATE), optax.sgd(1.0), every, codec, fragments=fragments, overlap_steps=1
        )
        program = everywhere("shard_map", tx.update, WORKERS)
        state = jax.eval_shape(jax.vmap(tx.init), rows)
        found = fg.audit(program.lower(rows, state, rows).compile())
        part = fragment(params, fragments)
        assert sum(c.bytes for c in found) == fg.wire_bytes(codec, part)
        assert {c.branch for c in found} == {branch}


def test_fragments_by_depth_are_a_partition():
    """Each label meets at its own times, as if the others were not there."""

    def of(every):
        return fg.optimizers.diloco(
            optax.sgd(RATE), optax.sgd(1.0), every, *DENSE, allow_masked=True
        )

    labels = {"w": "early", "b": "late", "kernel": "late", "scale": "late"}
    both = optax.partition({"early": of(4), "late": of(5)}, labels)
    grads = gradients(9)
    (params, _), (early, _), (late, _) = (end(tx, grads) for tx in (both, of(4), of(5)))
    np.testing.assert_array_equal(params["w"], early["w"])
    np.testing.assert_array_equal(params["b"], late["b"])
    np.testing.assert_array_equal(params["scale"], late["scale"])


def test_a_bad_meeting_is_that_of_its_fragment_alone():
    tx = fg.optimizers.diloco(optax.sgd(RATE), NESTEROV, 4, *DENSE, fragments=2)
    grads, weight = gradients(4), np.ones((4, WORKERS), np.float32)
    weight[3, 1] = np.nan  # where the second fragment meets
    _, states = run(tx, grads, ZEROS, weight=weight)
    assert [one.skipped[-1].tolist() for one in states.pmean] == [[0] * 4, [1] * 4]
    for met in jax.tree.leaves((states.anchor, states.outer[1])):
        np.testing.assert_array_equal(met[-1], met[1])
    assert np.abs(states.anchor["w"][-1, 0, :4]).min() > 0
