"""Selectors: which coefficients travel."""
