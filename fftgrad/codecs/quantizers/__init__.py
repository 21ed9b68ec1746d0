"""Quantizers: how many bits each coefficient gets. They come last in a chain."""
