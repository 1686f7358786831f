"""Callables that nobody wrote for the auditor, and what the auditor says of them."""

from bi_kernels.audit.zoo.animals import function  # noqa: F401  (what the zoo's reproducers import)
