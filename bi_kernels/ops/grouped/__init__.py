"""Mixtures of experts: tokens grouped by expert, a linear layer of each expert, and the sum of what a token gets."""
