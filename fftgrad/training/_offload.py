"""What each worker has of its own, in the memory of the host between two steps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fftgrad._contracts import PyTree
from fftgrad._values import check_transformation
from fftgrad.exchanges._per_worker import PerWorker

KIND = "pinned_host"
"""Memory of the host that a device reads and writes by itself."""


def offload(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Transformation: another one, whose residuals wait in the memory of the host.

    While a step computes its gradient, a residual only takes up room: 4 bytes a parameter, on each
    device. Here all floating-point state of each worker's own (residuals, velocities, late
    gradients) lies in pinned memory of the host. An update copies it to the device, and back.

        tx = fg.training.offload(fg.optimizers.feedback_adam(3e-4, axis_name="data"))

    It goes around a whole optimizer, around `compressed_pmean`, or around all of a chain. It saves
    nothing where the update needs more memory than the gradient, and each step waits for two copies
    over the bus of the host, which `fg.ErrorFeedback(dtype="bfloat16")` halves. A state from a file
    may lie on the devices: the first update moves it, and the step compiles twice.

    On a CPU both memories are the same, so it gains nothing; it was not tried on a GPU. Compiled
    for an H100 the program copies the new residuals to the host asynchronously.

    Args:
      tx: `compressed_pmean`, or a transformation with it inside.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the state of `tx`.

    Wire: that of `tx`.

    Claims: the same updates and states as without it, to the bit.

    Raises:
      ValueError: by `init`, if the devices have no such memory.

    Example:
      >>> tx = fg.compressed_pmean(fg.AllReduce(), fg.ErrorFeedback(), axis_name="data")
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> state = fg.init_state(fg.training.offload(tx), jnp.zeros(5), mesh, "data")
      >>> state.memory.worker_rows.residual.sharding.memory_kind
      'pinned_host'
    """
    check_transformation("offload(tx)", tx)
    run = optax.with_extra_args_support(tx).update

    def init(params: optax.Params) -> Any:
        _check_devices()
        return _moved(tx.init(params), jax.memory.Space.Host)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        near = _moved(state, jax.memory.Space.Device)
        updates, near = run(updates, near, params, **extra)
        return updates, _moved(near, jax.memory.Space.Host)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_devices() -> None:
    kinds = [memory.kind for memory in jax.local_devices()[0].addressable_memories()]
    if KIND not in kinds:
        raise ValueError(
            f"offload(tx): the devices must have memory of the kind {KIND!r}, got {kinds}; leave "
            "offload out, and use ErrorFeedback(dtype='bfloat16') for half of the memory."
        )


def _moved(state: PyTree, space: Any) -> PyTree:
    def move(leaf: Any) -> Any:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.device_put(leaf, space) if is_float else leaf

    def own(node: Any) -> Any:
        return jax.tree.map(move, node) if _is_own(node) else node

    return jax.tree.map(own, state, is_leaf=_is_own)


def _is_own(node: object) -> bool:
    return isinstance(node, PerWorker)
