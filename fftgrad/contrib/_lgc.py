"""LGC: learned gradient compression."""

from fftgrad._contracts import Exchange, Memory
from fftgrad._values import check_count
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.contrib._autoencoder import Autoencoder
from fftgrad.contrib._learned_codes import LearnedCodes, Variant
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._recipe import Recipe
from fftgrad.exchanges._rules import DenseByName
from fftgrad.exchanges._scheduled import Scheduled
from fftgrad.memories._error_feedback import ErrorFeedback


def lgc(
    fraction: float = 0.001,
    *,
    dense: tuple[str, ...] = (),
    dense_steps: int = 200,
    learning_steps: int = 300,
    variant: Variant = "leader",
    innovation: float = 1e-5,
    rate: float = 1e-3,
    leader: int | None = None,
    autoencoder: Autoencoder = Autoencoder(),
    memory: Memory = ErrorFeedback(),
) -> Recipe:
    """Method: an autoencoder learns the values of the top k, and then its codes travel.

    For `dense_steps` gradients travel dense. For `learning_steps` the workers send the values at
    the positions that a leader chooses, and all train the autoencoder on them. From then on they
    send codes of these values: see `LearnedCodes`. All of it is one program.

    Args:
      fraction: share of each leaf whose values are sent, in (0, 1].
      dense: words in the paths of leaves that always travel dense. The paper leaves out the first
        layer and the last two tensors: a gradient is a tree in the order of names, and which leaves
        these are only you know.
      dense_steps: for how many steps everything travels dense.
      learning_steps: for how many steps after them the autoencoder learns.
      leader: the number of the worker that chooses the positions; None for all in turn.
      variant: as for `LearnedCodes`.
      innovation: as for `LearnedCodes`.
      rate: as for `LearnedCodes`.
      autoencoder: as for `LearnedCodes`.
      memory: what is done with what a step does not send.

    Wire: of the n values of the leaves that are not dense, k = fraction · n, in the end 4 bits a
      value from one worker, or 8 from each with "all_reduce", and positions once.

    Claims: with the default memory nothing is lost (`ErrorFeedback`). By docs/results/training.md a
      quantizer of 4 bits has far less error at the bits of the leader's code.

    Differs from the paper: see `LearnedCodes`. The memory is plain error feedback.

    Example:
      >>> from fftgrad.contrib import learned
      >>> tx = fg.compressed_pmean(learned.lgc(dense=("embed", "head")), axis_name="data")

    References:
      Abrahamyan et al., TNNLS 2021, arXiv:2103.08870.
    """
    check_count("lgc(dense_steps)", dense_steps, "use 200.", least=0)
    check_count("lgc(learning_steps)", learning_steps, "use 300.", least=0)
    exchange: Exchange = LearnedCodes(
        DenseByName(dense, TopK(fraction=fraction)),
        dense_steps + learning_steps,
        variant=variant,
        innovation=innovation,
        rate=rate,
        leader=leader,
        autoencoder=autoencoder,
    )
    if dense_steps:
        exchange = Scheduled({0: AllReduce(), dense_steps: exchange})
    return Recipe(exchange, memory)
