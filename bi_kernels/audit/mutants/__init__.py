"""Mutants of our own kernels and launchers, and which of the audits' questions kills each."""

from bi_kernels.audit.runs.notebooks import find_helpers

find_helpers()  # some questions are those of a notebook
