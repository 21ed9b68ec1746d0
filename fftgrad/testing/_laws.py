"""Laws that codecs, exchanges and memories share, with inputs and comparisons."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import PyTree
from fftgrad._values import check_kind
from fftgrad.ops._shapes import spec

BAD = (np.nan, np.inf, -np.inf)

STEPS = (0, 1, 2, 7)
"""Numbers of the checked steps. Step 0 has the state of `init`."""

MAX_ERROR = 1.5
"""Maximum relative error of a biased part. A part with the wrong sign has a larger error."""

FLIPPED = 0.05
"""Maximum relative difference of two programs, which may encode a few values differently."""


@dataclasses.dataclass(frozen=True)
class Laws:
    """Laws that one codec, exchange or memory is checked for."""

    check: str  # name of the public function, such as "check_codec"
    part: Any  # the codec, exchange or memory

    def need(self, holds: object, law: str, rule: str, got: str, remedy: str) -> None:
        """Raise an AssertionError with the law and the remedy if the law does not hold."""
        if not bool(holds):
            broken = f"{self.check}({self.part!r}): law {law!r}: {rule}, got {got}; {remedy}"
            raise AssertionError(broken)

    @contextlib.contextmanager
    def running(self, law: str, rule: str, remedy: str) -> Generator[None]:
        """Report an exception of the part as a broken law."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            first = str(error).strip().split("\n", 1)[0]
            self.need(False, law, rule, f"{type(error).__name__}: {first}", remedy)

    def value(self, kind: type) -> None:
        """Law: the part compares, hashes and is frozen."""
        rule = "it must compare, hash and be frozen, and its repr must be the call that makes it"
        remedy = "declare its class with @dataclasses.dataclass(frozen=True), without arrays."
        check_kind(f"{self.check}(part)", self.part, kind, f"pass a {kind.__name__}.")
        with self.running("value", rule, remedy):
            equal = bool(copy.deepcopy(self.part) == self.part)
        fields: Any = getattr(type(self.part), "__dataclass_params__", None)
        frozen = fields is not None and fields.frozen and " at 0x" not in repr(self.part)
        self.need(equal and frozen, "value", rule, "none", remedy)

    def same_spec(self, what: str, found: PyTree, wanted: PyTree, remedy: str) -> None:
        """Law: two trees have the same structure, shapes and dtypes."""
        one, other = spec(jax.eval_shape(lambda: found)), spec(jax.eval_shape(lambda: wanted))
        self.need(one == other, "shapes", f"{what} must be like {other}", f"{one}", remedy)

    def same_state(self, found: PyTree, wanted: PyTree) -> None:
        """Law: a state has the same structure, shapes and dtypes in all steps."""
        remedy = "return a state of the structure, shapes and dtypes that init makes."
        self.same_spec("the next state", found, wanted, remedy)

    def near(
        self, law: str, rule: str, found: Any, wanted: Any, where: str, remedy: str,
        most: float = FLIPPED,
    ) -> None:  # fmt: skip
        """Law: two results are equal, except for a few values that are encoded differently."""
        distance = relative(found, wanted)
        got = f"a relative difference of {distance:.3g} {where}"
        self.need(distance <= most, law, rule, got, remedy)

    def programs(
        self, run: Callable[[Any], PyTree], inputs: Sequence[PyTree], where: str, remedy: str,
        eager: bool = True,
    ) -> None:  # fmt: skip
        """Laws: two calls return the same bits, jit changes nothing, and vmap equals a loop."""
        compiled = [jax.jit(run)(x) for x in inputs]
        if eager:
            plain, again = (run(inputs[0]) for _ in range(2))
            same, rule = flat(plain).tobytes() == flat(again).tobytes(), "two calls must agree"
            self.need(same, "jit", rule, f"different bits {where}", remedy)
            self.near("jit", "jit must change nothing", compiled[0], plain, where, remedy)
        stacked, each = (stack(trees) for trees in (inputs, compiled))
        found = jax.jit(jax.vmap(run))(stacked)
        self.near("vmap", "vmap must be a loop", found, each, where, remedy)

    def finite(self, tree: PyTree, where: str, remedy: str) -> None:
        rule, got = "finite values must stay finite", f"a non-finite value {where}"
        self.need(all_finite(tree), "finite", rule, got, remedy)

    def not_hidden(self, tree: PyTree, what: str, where: str, remedy: str) -> None:
        """Law: an input with a non-finite value has a non-finite result."""
        rule = f"a non-finite value must make {what} non-finite"
        self.need(not all_finite(tree), "not hidden", rule, f"finite values {where}", remedy)

    def along(self, what: str, x: PyTree, back: PyTree, where: str) -> None:
        """Law: x and its result have a positive inner product."""
        inner = float(flat(x) @ flat(back))
        self.need(
            inner > 0, "fidelity", f"{what} must point along x",
            f"an inner product of {inner:.3g} {where}", "look at its signs, and send some values.",
        )  # fmt: skip

    def bounded(
        self, what: str, x: PyTree, back: PyTree, max_error: float, where: str, remedy: str
    ) -> None:
        """Law: ||x - result|| <= max_error ||x||, so the result for zeros is zero."""
        norm, error = (float(np.linalg.norm(a)) for a in (flat(x), flat(x) - flat(back)))
        close = error <= max_error * norm * (1 + 1e-6) or math.isinf(max_error)
        rule = f"{what} must be at most {max_error:g} ||x|| away from x"
        got = f"{error:.3g} for ||x|| = {norm:.3g}, {where}"
        self.need(close, "fidelity", rule, got, remedy)


def values(n: int, seed: int = 0) -> np.ndarray:
    """Return heavy-tailed, serially correlated, nonzero values, float32[n]."""
    white = np.random.default_rng(seed).standard_t(3, n + 1)
    return (white[1:] + 0.5 * white[:-1]).astype(np.float32)


def finite_values(n: int) -> dict[str, np.ndarray]:
    """Return inputs whose results must be finite. Errors name an input by its key."""
    x = values(n)
    return {
        "heavy-tailed values": x,
        "zeros": np.zeros_like(x),
        "equal values": np.full_like(x, -3.0),
        "one value that is not zero": np.where(np.arange(n) == n // 2, 1, 0).astype(np.float32),
        "huge values": (x / np.abs(x).max() * 1e37 / n).astype(np.float32),
        "tiny values": (x / np.abs(x).max() * 1e-30).astype(np.float32),
        "subnormal values": (x / np.abs(x).max() * 1e-40).astype(np.float32),
    }


def bad_values(n: int) -> dict[str, np.ndarray]:
    """Return inputs with one non-finite value. Their results must not be finite."""
    out = dict[str, np.ndarray]()
    for position in sorted({0, n // 3, n // 2, n - 1}):
        for bad in BAD:
            x = values(n, seed=position)
            x[position] = bad
            out[f"{bad} at position {position} of {n}"] = x
    return out


def far_below(n: int) -> np.ndarray:
    """Return values, float32[n]. One of them is 30 to 600 times as large as the others."""
    own = np.clip(np.abs(values(n)), 0.5, 1.0) * np.where(np.arange(n) % 2, 1 / 30, 1 / 300)
    return (np.sign(values(n)) * np.where(np.arange(n) == n // 3, 1.0, own)).astype(np.float32)


TREE = {
    "b": jax.ShapeDtypeStruct((37,), jnp.float32),
    "w": jax.ShapeDtypeStruct((12, 10), jnp.float32),
}
"""Shapes of a small model."""


def tree_of(like: PyTree, seed: int = 0) -> PyTree:
    """Return float32 values in the shapes of a tree."""
    leaves, structure = jax.tree.flatten(like)
    drawn = [values(leaf.size, 100 * seed + i) for i, leaf in enumerate(leaves)]
    made = [jnp.asarray(x.reshape(leaf.shape)) for x, leaf in zip(drawn, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


def stack(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *rows: np.stack(rows), *trees)


def spoiled(tree: PyTree, number: int, position: int, bad: float) -> PyTree:
    """Return a tree with the value `bad` at one position of leaf `number`."""
    leaves, structure = jax.tree.flatten(tree)
    values = np.array(leaves[number])
    values.reshape(-1)[position] = bad
    return jax.tree.unflatten(structure, [*leaves[:number], values, *leaves[number + 1 :]])


def flat(tree: PyTree) -> np.ndarray:
    """Concatenate all values of a tree to one float64 vector."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def options(n: int) -> dict[str, Any]:
    """Return compiler options. All optimizations may drop a NaN, but only in long vectors."""
    if n < 1000:
        return {}
    return {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def relative(found: PyTree, wanted: PyTree) -> float:
    """Return ||found - wanted|| / ||wanted||; 0 if both are zero."""
    norm, error = (float(np.linalg.norm(a)) for a in (flat(wanted), flat(found) - flat(wanted)))
    return error / max(norm, np.finfo(np.float64).tiny)


def all_finite(tree: PyTree) -> bool:
    """True if all values are finite. NumPy decides, because XLA may drop a NaN."""
    return all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in jax.tree.leaves(tree))
