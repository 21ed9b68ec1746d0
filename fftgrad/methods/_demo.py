"""DeMo: decoupled momentum."""

from fftgrad._contracts import Codec, Like
from fftgrad._values import check_count, value
from fftgrad.codecs._chain import chain
from fftgrad.codecs.selectors._chunk_top_k import ChunkTopK
from fftgrad.codecs.transforms import _tiles
from fftgrad.codecs.transforms._dct import Dct
from fftgrad.codecs.transforms._identity import Identity
from fftgrad.codecs.transforms._tiles import Tiles
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._recipe import Recipe
from fftgrad.memories._error_feedback import ErrorFeedback


@value
class LargestOfTiles:
    """Function: the k largest values, or cosines, of each tile of a leaf."""

    transform: type[Dct] | type[Tiles]
    k: int
    block: int
    quantizer: Codec = Identity()

    def __post_init__(self) -> None:
        check_count("LargestOfTiles(k)", self.k, "use k=32.")
        self.transform(self.block)

    def __call__(self, name: str, like: Like) -> Codec:
        transform = self.transform(self.block, shape=_tiles.shape_of(like))
        chunk = max(2, transform.tile_size)
        return chain(transform, ChunkTopK(chunk, min(self.k, chunk)), self.quantizer)


def demo(k: int = 32, block: int = 64, decay: float = 0.999) -> Recipe:
    """Method: a momentum on each worker, whose fast cosines are sent and taken out; sign descent.

        D = decay · D + g,   C = DCT of D by tiles,   q = the k largest of each tile,
        D = D - IDCT(q),     update = sign(IDCT(mean q)).

    Placement: the momentum is before the compression and is what remains of it, that is error
    feedback with a decay. It differs between the workers, and the parameters do not.

    Args:
      k: coefficients sent of each tile; the authors' runs use 32 of 4096, and 8 for 85x.
      block: largest side of a tile; a leaf of one axis has tiles of `block` values.
      decay: of the momentum.

    Returns:
      A `Recipe`. Its mean is followed by `optax.scale_by_sign()`, and that by `optax.scale(-rate)`.

    Wire: k (32 + 9) bits a tile of 4096 for k = 32; the authors' code takes 96.

    Claims: biased.

    Differs from the paper: the mean is over all workers, where its code divides by the number that
      sent a coefficient, which makes what few send weigh as much as what all do; axes are padded to
      whole tiles; the learning rate does not enter the momentum, which makes no difference to sign
      descent while it is constant.

    Example:
      >>> tx = fg.compressed_pmean(fg.methods.demo(k=32), axis_name="data")

    References:
      Peng, Quesnelle and Kingma, 2024, arXiv:2411.19870.
    """
    return Recipe(AllGather(LargestOfTiles(Dct, k, block)), ErrorFeedback(decay))
