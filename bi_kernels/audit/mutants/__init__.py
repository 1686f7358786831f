"""Mutants of our own kernels and launchers, and which of the audits' questions kills each."""
