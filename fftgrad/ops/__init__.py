"""Operations: arrays in, arrays out. Knows nothing of codecs. May import `_axes` only."""
