"""The life of a run in any order: nothing is lost, whatever happens to it."""

import functools
import tempfile

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import stateful
from hypothesis import strategies as st
from parallel import AXIS

import fftgrad as fg
from fftgrad import checkpoint

LIKE = {"w": jnp.zeros((9, 7)), "b": jnp.zeros(11)}
SIZE = 9 * 7 + 11
EXCHANGES = {
    "top-k": lambda _: fg.AllGather(fg.chain(fg.TopK(0.1), fg.LogLevels(6))),
    "low rank": lambda _: fg.PowerSgd(rank=1),
    "low rank in turns": lambda _: fg.AcpSgd(rank=1),
    "two stages": lambda workers: fg.TwoStage(fg.Sign(), workers=workers),
}


def is_own(node):
    return isinstance(node, fg.exchanges.PerWorker)


@functools.cache
def program(name, workers):
    """A fresh state as rows, and a step from rows to rows."""
    tx = fg.compressed_pmean(EXCHANGES[name](workers), fg.ErrorFeedback(), axis_name=AXIS)
    row = jax.eval_shape(tx.init, LIKE)
    axes = jax.tree.map(
        lambda node: jax.tree.map(lambda _: 0, node) if is_own(node) else None, row, is_leaf=is_own
    )

    def update(grads, state):
        own = jax.tree.map(
            lambda n: jax.tree.map(lambda a: a[None], n) if is_own(n) else n, state, is_leaf=is_own
        )
        mean, state = tx.update(grads, own)
        back = jax.tree.map(
            lambda n: jax.tree.map(lambda a: a[0], n) if is_own(n) else n, state, is_leaf=is_own
        )
        return mean, back

    every = jax.tree.map(lambda _: 0, row)
    mapped = jax.vmap(update, in_axes=(0, axes), out_axes=(0, every), axis_name=AXIS)

    @jax.jit
    def step(grads, state):
        mean, new = mapped(grads, state)
        shared = jax.tree.map(
            lambda n: n if is_own(n) else jax.tree.map(lambda a: a[0], n), new, is_leaf=is_own
        )
        equal = [
            jnp.array_equal(a, jnp.broadcast_to(a[:1], a.shape), equal_nan=True)
            for a in jax.tree.leaves(mean)
        ]
        return jax.tree.map(lambda a: a[0], mean), shared, jnp.all(jnp.stack(equal))

    first = jax.vmap(lambda _: tx.init(LIKE))(jnp.arange(workers))
    fresh = jax.tree.map(
        lambda n: (
            jax.tree.map(lambda a: a[:, 0], n) if is_own(n) else jax.tree.map(lambda a: a[0], n)
        ),
        first,
        is_leaf=is_own,
    )
    return fresh, step


def flat(tree):
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in jax.tree.leaves(tree)])


class Life(stateful.RuleBasedStateMachine):
    """What came is what was applied, and what waits: in memories, and in the owners' of shards."""

    @stateful.initialize(name=st.sampled_from(list(EXCHANGES)), workers=st.sampled_from([1, 2, 4]))
    def begin(self, name, workers):
        self.folder = tempfile.TemporaryDirectory()
        self.name, self.workers = name, workers
        self.state, _ = program(name, workers)
        self.came = self.gone = np.zeros(SIZE)
        self.saved, self.saves, self.skipped = None, 0, 0

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def grads(self, seed):
        rng = np.random.default_rng(seed)
        return jax.tree.map(
            lambda a: rng.standard_t(3, (self.workers, *a.shape)).astype(np.float32), LIKE
        )

    @stateful.rule(seed=st.integers(0, 1000))
    def step(self, seed):
        grads = self.grads(seed)
        mean, self.state, equal = program(self.name, self.workers)[1](grads, self.state)
        assert equal
        self.came = self.came + flat(jax.tree.map(lambda g: g.mean(0, dtype=np.float64), grads))
        self.gone = self.gone + flat(mean)

    @stateful.rule(seed=st.integers(0, 1000), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
    def skip(self, seed, bad):
        grads = self.grads(seed)
        grads["w"][seed % self.workers, seed % 9, seed % 7] = bad
        mean, self.state, _ = program(self.name, self.workers)[1](grads, self.state)
        self.skipped += 1
        assert not np.all(np.isfinite(flat(mean)))

    @stateful.rule()
    def save(self):
        self.saves += 1
        checkpoint.save(self.folder.name, self.saves, self.state)
        self.saved = self.came, self.gone, self.skipped, self.name, self.workers

    @stateful.precondition(lambda self: self.saved is not None)
    @stateful.rule(workers=st.sampled_from([1, 2, 3, 4]))
    def resume(self, workers):
        self.came, self.gone, self.skipped, self.name, before = self.saved
        found = checkpoint.restore(self.folder.name, program(self.name, workers)[0])
        self.state, self.workers = found.tree, workers
        assert (found.step, found.workers) == (self.saves, (before, workers))

    @stateful.rule(workers=st.sampled_from([1, 2, 3, 4]))
    def reshard(self, workers):
        out = fg.checkpoint.reshard_state(self.state, program(self.name, workers)[0])
        self.state, self.workers = out.state, workers

    @stateful.rule(name=st.sampled_from(list(EXCHANGES)))
    def change_method(self, name):
        fresh, _ = program(name, self.workers)
        self.state = fg.checkpoint.reshard_state(self.state, fresh).state
        self.name = name

    @stateful.invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "state"):
            return
        residual = self.state.memory.worker_rows.residual
        held = flat(jax.tree.map(lambda a: np.asarray(a, np.float64).mean(0), residual))
        np.testing.assert_allclose(self.gone + held, self.came, rtol=1e-3, atol=1e-3)
        assert int(self.state.skipped) == self.skipped


# A step that fails tells of all that went before it; more steps find more than more lives.
Life.TestCase.settings = hypothesis.settings(
    max_examples=12, stateful_step_count=14, deadline=None, derandomize=True
)
test_life = Life.TestCase
