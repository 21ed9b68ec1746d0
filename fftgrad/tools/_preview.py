"""What each leaf of a gradient travels through, and what that costs."""

import math
from typing import NamedTuple

from fftgrad._contracts import Codec, PyTree
from fftgrad.exchanges import _layout, _parts
from fftgrad.exchanges._all_gather import AllGather
from fftgrad.exchanges._layout import Layout
from fftgrad.exchanges._policy import Policy
from fftgrad.exchanges._rules import Codecs
from fftgrad.ops import _wire


class PreviewRow(NamedTuple):
    """What becomes of one leaf.

    Attributes:
      leaf: its path; None in the row of a `Rule` that no leaf meets.
      shape: its shape.
      part: the name of the part that it belongs to.
      codec: what the part travels through.
      bytes: its share, by its values, of the part's payload.
    """

    leaf: str | None
    shape: tuple[int, ...]
    part: str
    codec: Codec
    bytes: float


def preview(codec: Codecs, params: PyTree, layout: Layout = Layout()) -> list[PreviewRow]:
    """Function: what each leaf of a gradient would travel through, and in how many bytes.

    Nothing is computed. The bytes add up to those of the payloads; the header of a buffer takes
    8 more.

    Args:
      codec: a codec, or a rule such as a `Policy`.
      params: a tree like the gradient, or its shapes.
      layout: as for `compressed_pmean`.

    Returns:
      A row for each leaf, in order, and then one for each rule of a `Policy` that no leaf meets,
      because a pattern has a typo or an earlier rule takes all that it is for.

    Example:
      >>> fg.tools.preview(fg.Sign(), {"w": jnp.ones((8, 8))})[0].bytes
      12.0
    """
    _parts.check_codec("preview", codec)
    layout = layout.for_exchange(AllGather(codec))
    codecs: dict[str, Codec] = {}
    payloads: dict[str, int] = {}
    for bucket in _layout.bucket_likes(params, layout):
        for part in bucket:
            own = _parts.codec_of(codec, part)
            payload = _wire.nbytes(own.payload_spec(_parts.vector_likes(part))) - _wire.nbytes(())
            codecs[part.name] = own.codecs[0]
            payloads[part.name] = payloads.get(part.name, 0) + payload
    rows: dict[int, PreviewRow] = {}
    for name, members in _layout.groups(_layout.like(params), layout).items():
        total = sum(math.prod(member.leaf.shape) for member in members)
        for number, path, leaf in members:
            if math.prod(leaf.shape):
                share = payloads[name] * math.prod(leaf.shape) / total
                rows[number] = PreviewRow(path, leaf.shape, name, codecs[name], share)
    rules = codec.of_rules if isinstance(codec, Policy) else {}
    unmet = [
        PreviewRow(None, (), name, own, 0.0) for name, own in rules.items() if name not in codecs
    ]
    return [*(rows[number] for number in sorted(rows)), *unmet]
