"""Helpers of single notebooks, each used by one of them and not part of the package."""
