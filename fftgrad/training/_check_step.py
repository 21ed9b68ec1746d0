"""What `data_parallel` refuses of arguments and results, while tracing."""

from typing import Any, cast

import jax
from jax.sharding import Mesh, PartitionSpec

from fftgrad import _axes
from fftgrad._contracts import AxisName, PyTree


def check_rows(carried: PyTree, specs: PyTree, mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses a state that has no row for each worker, or for each shard of each worker."""
    own = set(_axes.names(axis_name))
    leaves = jax.tree.leaves_with_path(carried)
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs, is_leaf=_is_spec), strict=True):
        if own.isdisjoint(_axes.named(spec)):
            continue
        rows = _axes.mesh_size(mesh, spec[0])
        if leaf.shape[:1] != (rows,):
            raise ValueError(
                f"data_parallel(arguments{jax.tree_util.keystr(path)}): must have one row for each "
                f"of the {rows} workers, got {list(leaf.shape)}; make the state by "
                "fg.init_state(tx, params, mesh, axis_name), and do not take a row of it."
            )


def check_shares(batch: tuple[Any, ...], workers: int, axis_name: AxisName) -> None:
    """Refuses a batch that the workers cannot share evenly."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not leaf.ndim or leaf.shape[0] % workers:
            raise ValueError(
                f"data_parallel(batch{jax.tree_util.keystr(path)}): must have a leading axis that "
                f"the {workers} workers along {axis_name!r} share evenly, got "
                f"{leaf.dtype}{list(leaf.shape)}; give each worker as many rows, or, for what all "
                "of them need whole, put it before the state among the arguments, and return it; "
                f"each makes its own of a key by jax.lax.axis_index({axis_name!r}) and fold_in."
            )


def check_result(out: Any, carried: tuple[Any, ...], specs: PyTree, axis_name: AxisName) -> None:
    """Refuses results that are not what is carried, or that differ between the workers."""
    count = len(carried)
    if not isinstance(out, tuple) or len(cast("tuple[Any, ...]", out)) < count:
        raise ValueError(
            f"data_parallel(step): must return a tuple: its first {count} arguments, up to the one "
            f"with the state of compressed_pmean, and what else there is, got {_say_results(out)}; "
            "write return params, state, value, and give the batch after the state."
        )
    for number, (one, other) in enumerate(zip(out, carried, strict=False)):
        if jax.tree.structure(one) != jax.tree.structure(other):
            raise ValueError(
                f"data_parallel(step): must return its first {count} arguments in their order, got "
                f"{_say(one)} of another structure at [{number}], for {_say(other)}; write "
                "return params, state, value."
            )
    own = set(_axes.names(axis_name))
    whole = jax.tree.leaves(specs, is_leaf=_is_spec)
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(out)):
        sharded = number < len(whole) and not own.isdisjoint(_axes.named(whole[number]))
        if not sharded and _axes.known_to_vary(leaf, axis_name):
            raise ValueError(say_differs(f"results{jax.tree_util.keystr(path)}", axis_name))


def say_differs(what: str, axis_name: AxisName) -> str:
    """The answer to a result that is not the same on all workers."""
    return (
        f"data_parallel(step): must return what is the same on all workers, got {what}, which "
        f"varies over {axis_name!r}; update parameters by what compressed_pmean returns, and take "
        f"jax.lax.pmean(x, {axis_name!r}) of a loss or of other statistics; wrap a transformation "
        "with a state that comes before compressed_pmean as fg.per_worker(...). With local steps "
        "(fg.optimizers.diloco) parameters differ: shard a row for each worker by jax.shard_map."
    )


def _say_results(out: Any) -> str:
    return f"{len(out)} results" if isinstance(out, tuple) else _say(out)


def _say(node: Any) -> str:
    return f"{node.dtype}{list(node.shape)}" if isinstance(node, jax.Array) else type(node).__name__


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)
