"""What a step takes with any chain that exchanges."""

from collections.abc import Mapping
from typing import get_args

import optax

from fftgrad._contracts import PyTree
from fftgrad._values import check_choice
from fftgrad.advise import _exchange, _inputs, _units
from fftgrad.advise._cost import Algorithm, Parts, exchange_seconds, step_seconds
from fftgrad.advise._exchange import Timing
from fftgrad.advise._link import Link


def predict_step(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    step: str | float,
    link: Link | str | float | Mapping[str, Link],
    axes: Mapping[str, int],
    timing: Timing | None = None,
    every: int = 1,
    buckets: int = 1,
    algorithm: Algorithm = "fastest",
) -> float:
    """Function: what a step takes with any chain, as `plan` predicts it for its candidates.

    What the chain sends is read off a trace, without devices; docs/plan.md has the model.

    Args:
      tx: the chain, without the optimizer if `step` has one already.
      params: the parameters, or their shapes.
      step: seconds of a step without any exchange, or a text: "300ms".
      link: that of each worker, or its bandwidth alone: "1gbit"; or of each axis: `{"slow": ...,
        "fast": ...}`.
      axes: how many workers there are along each axis that the chain names: `{"data": 16}`.
      timing: what an exchange takes on a device, from `fg.advise.time_exchange`, which is called
        if it is left out.
      every: the steps of which one exchanges, for local steps; with fragments, those between two
        meetings. What is sent under no condition is sent in each.
      buckets: in how many the gradient leaves while the backward pass runs: as many as the chain's
        `Layout(bucket_bytes=...)` makes.
      algorithm: of the collectives, "ring" or "tree", or for each the faster of a ring and what
        libraries use for short messages; docs/plan.md says which use what.

    Returns:
      Seconds of a step, the mean over those with and without an exchange.

    Wire: nothing is sent.

    Raises:
      TypeError: if a leaf is not what `compressed_pmean` takes.
      ValueError: if an axis has no link, if `every` or `buckets` is not positive, if the timing is
        of other workers, or if what is sent changes from step to step or is sent in a loop.

    Example:
      >>> import fftgrad as fg
      >>> import jax
      >>> params = jax.ShapeDtypeStruct((5000, 5000), "float32")
      >>> dgc = fg.compressed_pmean(fg.methods.dgc(0.001), axis_name="data")
      >>> timing = fg.advise.Timing(compress=0.05, decompress=0.02)
      >>> link = fg.advise.Link("1gbit", "100us")
      >>> seconds = fg.advise.predict_step(
      ...     dgc, params, step="300ms", link=link, axes={"data": 16}, timing=timing
      ... )
      >>> f"{seconds:.2f} s"
      '0.39 s'
    """
    _inputs.check_count("predict_step(every)", every, "use 1 where each step exchanges.")
    _inputs.check_count("predict_step(buckets)", buckets, "use 1 for no overlap.")
    check_choice("predict_step(algorithm)", algorithm, get_args(Algorithm))
    like, own = _inputs.like_of("predict_step", params), _units.seconds("predict_step(step)", step)
    links = _links(link)
    if isinstance(links, dict) and (missing := sorted({*axes} - {*links})):
        raise ValueError(
            f"predict_step(link): must have a link for each axis, got none for {missing}; add "
            "fg.advise.Link('1gbit')."
        )
    if timing is None:
        timing = _exchange.time_exchange(tx, params, axes, every=every)
    _exchange.check_timing("predict_step(timing)", timing, tuple(axes.values()))
    sent = _exchange.traffic("predict_step(tx)", tx, like, axes, every)
    exchange = exchange_seconds(sent, links, algorithm)
    parts = Parts(own, timing.compress, exchange, timing.decompress)
    return step_seconds(parts, every=every, buckets=buckets)


def _links(given: Link | str | float | Mapping[str, Link]) -> Link | dict[str, Link]:
    if isinstance(given, Mapping):
        return {axis: _inputs.link_of(link) for axis, link in given.items()}
    return _inputs.link_of(given)
