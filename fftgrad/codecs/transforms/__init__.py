"""Transforms: invertible linear maps to a basis in which a gradient is compact."""
