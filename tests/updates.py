"""The updates of `compressed_pmean` that many laws read: one program for each way to make one."""

import functools

import jax
from cases import gradients
from parallel import AXIS, everywhere, of_size, train_step

import fftgrad as fg

WORKERS = 4
PAIR = {"a": jax.ShapeDtypeStruct((8, 8), "float32"), "b": jax.ShapeDtypeStruct((8, 8), "float32")}
BUCKETS = fg.Bucketing("leaf", 256)
"""For `PAIR`, a bucket for each leaf."""
FEEDBACK = fg.ErrorFeedback()


def _transformation(exchange, policy, workers, memory, options):
    return fg.compressed_pmean(
        of_size(exchange, workers), memory, axis_name=AXIS, non_finite=policy, **options
    )


@functools.cache
def _mapped(exchange, policy, workers, memory, options):
    tx = _transformation(exchange, policy, workers, memory, dict(options))
    return jax.jit(jax.vmap(tx.init)), everywhere("vmap", lambda g, s: tx.update(g, s), workers)


def mapped(exchange, policy="propagate", workers=WORKERS, memory=FEEDBACK, **options):
    """`init` and `update` under vmap, of stacked gradients and states."""
    # A cache tells an argument that is left at its default from one that is given.
    return _mapped(exchange, policy, workers, memory, tuple(sorted(options.items())))


@functools.cache
def _sharded(exchange, policy, memory, check_vma, like, options):
    leaves, structure = like
    tx = _transformation(exchange, policy, WORKERS, memory, dict(options))
    like = jax.tree.unflatten(structure, leaves)
    return train_step(tx, WORKERS, check_vma=check_vma, like=like)


def sharded(exchange, policy="propagate", memory=FEEDBACK, *, check_vma=True, like=None, **options):
    """`init` of parameters and `update` of stacked gradients under shard_map."""
    leaves, structure = jax.tree.flatten(PAIR if like is None else like)
    key = tuple(leaves), structure
    return _sharded(exchange, policy, memory, check_vma, key, tuple(sorted(options.items())))


@functools.cache
def _collectives(init, update):
    lowered = update.lower(gradients(PAIR, WORKERS), jax.eval_shape(init, PAIR))
    return fg.audit(lowered.compile())


def collectives(exchange, policy="propagate", **options):
    """What the program of an update for `PAIR` under shard_map sends, without memory."""
    return _collectives(*sharded(exchange, policy, fg.NoMemory(), **options))
