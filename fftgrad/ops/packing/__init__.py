"""Packing: codes and indices of any width in uint32 words, with no bit unused but in the last."""
