"""Reproducers: short scripts that show a drift as it was reported, each run in a fresh process before it is named."""
