"""Operations on arrays, independent of codecs. May import only `_axes` and `_values`."""
