"""What a step knows of itself, and what it learns of all workers."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad.ops import _count, _finite, _random


class Step(NamedTuple):
    """What a step knows of itself: its number, and its randomness; `Step()` has none.

    Attributes:
      number: how many steps there were before, int32, equal on all workers; 2^30 comes after
        2^31 - 1, so from then on the keys of the last 2^30 steps repeat.
      shared: a key equal on all workers: random supports, random signs. Decompressing may use it.
      local: a key that differs between workers: dither. Decompressing must not use it, because
        the receiver has another one.
    """

    number: jax.Array | int = 0
    shared: jax.Array | None = None
    local: jax.Array | None = None

    @classmethod
    def of(cls, key: jax.Array | int, number: jax.Array | int = 0) -> "Step":
        """The step of a worker that is on its own, from a seed or a key."""
        shared, local = jax.random.split(_random.as_key("Step.of(key)", key))
        return cls(number, shared, local)

    def fold(self, other: jax.Array | int) -> "Step":
        """The same step with other randomness, for one of several things done in it."""
        if self.shared is None:
            return self
        return self.fold_local(other)._replace(shared=jax.random.fold_in(self.shared, other))

    def fold_local(self, other: jax.Array | int) -> "Step":
        """The same step with other local randomness only."""
        if self.local is None:
            return self
        return self._replace(local=jax.random.fold_in(self.local, other))


class Tally(NamedTuple):
    """What an exchange learned of all workers on the way, the same on all of them.

    Attributes:
      finite: False if a header said that something was not finite, bool[].
        A sum needs no header: what is not finite in it shows in the mean.
      overflow: how many values the codecs could not represent, int32[].
    """

    finite: jax.Array | bool = True
    overflow: jax.Array | int = 0

    @property
    def poison(self) -> jax.Array:
        """0.0 if all is finite, else NaN: to be added to a mean."""
        return _finite.poison_unless(jnp.asarray(self.finite))

    @classmethod
    def of_all(cls, tallies: "Sequence[Tally]") -> "Tally":
        """The tally of several exchanges in one step."""
        every = [jnp.asarray(tally.finite) for tally in tallies]
        return cls(
            finite=jnp.all(jnp.stack(every)) if every else jnp.ones((), bool),
            overflow=_sum([t.overflow for t in tallies]),
        )


def _sum(counts: list[jax.Array | int]) -> jax.Array:
    return jnp.asarray(functools.reduce(_count.add, counts, 0), jnp.int32)
