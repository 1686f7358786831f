"""Finds the first op of a model whose inputs agree between two layouts while its outputs differ."""
