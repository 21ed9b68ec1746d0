"""What a codec costs beside its bytes: memory, compile time, and the size of its program."""

import jax
import jax.numpy as jnp
import pytest
from cases import CODECS

import fftgrad as fg

EVERY_PLATFORM = True
STEP = fg.Step.of(3)


def programs(codec, n):
    like = jax.ShapeDtypeStruct((n,), jnp.float32)
    payload = jax.eval_shape(lambda x: fg.compress(codec, x, step=STEP), like)
    return (
        (lambda x: fg.compress(codec, x, step=STEP), like),
        (lambda p: fg.decompress(codec, p, like, step=STEP), payload),
    )


def equations(jaxpr, platform) -> int:
    """How many there are in the program for a platform."""
    return sum(
        1 + sum(equations(part, platform) for part in inner(eqn.params, platform))
        for eqn in jaxpr.eqns
    )


def inner(params, platform):
    if params.get("branches_platforms"):
        names = [names or (platform,) for names in params["branches_platforms"]]
        chosen = next(i for i, these in enumerate(names) if platform in these)
        params = {"branch": params["branches"][chosen]}
    for leaf in jax.tree.leaves(params, is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
        if hasattr(leaf, "jaxpr"):
            yield leaf.jaxpr
        elif hasattr(leaf, "eqns"):
            yield leaf


GROWING = "top-k 6 bits", "blocked", "paper", "budget", "threshold", "tiles", "lloyd-max", "levels"


@pytest.mark.parametrize("name", GROWING)
def test_the_program_does_not_grow_with_the_vector(name):
    jaxprs = [
        [jax.make_jaxpr(f)(like).jaxpr for f, like in programs(CODECS[name], n)]
        for n in (1 << 17, 1 << 26)
    ]
    for platform in ("cpu", "cuda"):
        sizes = [sum(equations(jaxpr, platform) for jaxpr in both) for both in jaxprs]
        # Not equal: the width of an index follows n/k, and packing it takes a step a code of a
        # group.
        assert max(sizes) - min(sizes) <= 250
        assert max(sizes) <= 2500


@pytest.mark.parametrize("name", ["top-k 6 bits", "blocked", "paper", "blocked dct"])
def test_temporaries_are_at_most_three_inputs(name):
    n = 1 << 20
    for f, like in programs(CODECS[name], n):
        memory = jax.jit(f).lower(like).compile().memory_analysis()
        assert memory.temp_size_in_bytes <= 3 * 4 * n
