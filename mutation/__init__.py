"""Mutation testing: bugs planted in this package's kernels and launchers, and which of them the audits catch."""
