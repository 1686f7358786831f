"""Reproducers: standalone scripts that show a drift, as small as the drift allows."""
