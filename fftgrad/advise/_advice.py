"""What follows from the figures, by rules: each sentence names those it rests on."""

from collections.abc import Iterator, Sequence

from fftgrad.advise._bases import BASES
from fftgrad.advise._figures import SHARE, Figures, StepPair
from fftgrad.advise._rates import Rate

BETTER = 0.97
"""A basis pays if it loses less than this share of what no basis loses."""

ALIKE, UNLIKE = 0.5, 0.2
"""From here on supports are shared with gain; below that they are not."""

FEW, MUCH = 0.01, 10.0
"""A leaf of at most this share of the values is left dense if it has so many times that share of
the energy."""

MANY_ZEROS = 0.2


def sentences(
    whole: Figures, leaves: Sequence[Figures], pairs: Sequence[StepPair], rates: Sequence[Rate]
) -> Iterator[str]:
    """The recommendation."""
    yield _basis(whole)
    for ratio in sorted({rate.ratio for rate in rates}, reverse=True):
        yield from _codec([rate for rate in rates if rate.ratio == ratio])
    yield from _support(whole, pairs)
    yield from _noise(whole)
    yield from _dense_leaves(whole, leaves)
    if whole.zeros >= MANY_ZEROS:
        yield (
            f"{whole.zeros:.0%} of the values are exactly zero: a selector sends nothing for them, "
            "a few-bit codec sends them all."
        )


def _basis(whole: Figures) -> str:
    """Of those that there is a transform for; a rotation is for quantizers."""
    usable = {b.name: b.codec for b in BASES if b.codec and b.name not in ("none", "Hadamard")}
    best = min(usable, key=lambda name: float(whole.dropped[name][1]))
    there, here = float(whole.dropped[best][1]), float(whole.dropped["none"][1])
    if there < BETTER * here:
        neighbors = 0.0 if whole.correlation is None else whole.correlation[0]
        return (
            f"Transform by {usable[best]!r} before selecting: the largest 1 % of its coefficients "
            f"leave an error of {there:.3f}, the largest 1 % of the values {here:.3f} (neighbors "
            f"correlate by {neighbors:.2f})."
        )
    return (
        f"Use no transform: the largest 1 % of the values leave an error of {here:.3f}, the "
        f"largest 1 % of the best transform's coefficients, {usable[best]!r}, one of {there:.3f}."
    )


def _codec(rates: Sequence[Rate]) -> Iterator[str]:
    """The best of a size."""
    best = min(rates, key=lambda rate: rate.error)
    others = [rate for rate in rates if rate.is_dense != best.is_dense]
    size = f"At {best.ratio:g} times fewer bytes than float32"
    if not others:
        yield (
            f"{size}, {best.codec!r} loses least: an error of {best.error:.3f}, in "
            f"{best.bits:.3g} bits a value where an ideal entropy coder takes {best.bound:.3g}."
        )
        return
    other = min(others, key=lambda rate: rate.error)
    kind, of_others = "sparse", "codec of a few bits for each value"
    if best.is_dense:
        kind, of_others = "dense", "sparse codec"
    yield (
        f"{size} your gradients are {kind}: {best.codec!r} has an error of {best.error:.3f}, "
        f"the best {of_others}, {other.codec!r}, {other.error:.3f}."
    )


def _support(whole: Figures, pairs: Sequence[StepPair]) -> Iterator[str]:
    if whole.overlap is not None:
        said = (
            f"the largest 1 % of two workers have {whole.overlap:.0%} of their places in common, "
            f"by chance {SHARE:.0%}"
        )
        if whole.overlap >= ALIKE:
            yield f"SharedSupport, or methods.scalecom, pays: {said}."
        elif whole.overlap < UNLIKE:
            yield f"Let each worker choose its own coefficients, by AllGather: {said}."
        else:
            yield f"SharedSupport is worth a try, and AllGather is the safe choice: {said}."
    for pair in pairs:
        said = (
            f"from step {pair.steps[0]} to {pair.steps[1]} a worker's largest 1 % keep "
            f"{pair.overlap:.0%} of their places, by chance {SHARE:.0%}"
        )
        if pair.overlap >= ALIKE:
            yield (
                "The workers may choose by what was large before, as PredictedSupport() does: "
                f"{said}."
            )
        else:
            yield f"Places have to be sent anew, which PredictedSupport() does not: {said}."


def _noise(whole: Figures) -> Iterator[str]:
    if whole.cosine is None:
        return
    if whole.signal is None:
        yield (
            f"All workers have the same gradient (cosine {whole.cosine:.3f}): are their batches "
            "the same?"
        )
        return
    noise = (1 / (1 + whole.signal)) ** 0.5
    yield (
        f"A relative error below {noise:.2f} is less than the noise of one worker's batch: two "
        f"workers' gradients have a cosine of {whole.cosine:.3f}, {whole.signal:.3g} parts of "
        "signal to one of noise."
    )


def _dense_leaves(whole: Figures, leaves: Sequence[Figures]) -> Iterator[str]:
    found = [
        leaf
        for leaf in leaves
        if leaf.values <= FEW * whole.values and leaf.energy >= MUCH * leaf.values / whole.values
    ]
    for leaf in sorted(found, key=lambda leaf: -leaf.energy)[:5]:
        yield (
            f"Leave dense, by a Policy: {leaf.name}, with {leaf.values / whole.values:.2%} of the "
            f"values and {leaf.energy:.1%} of the energy."
        )
