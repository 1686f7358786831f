"""The auditor tried on callables that nobody wrote for it."""

from bi_kernels.audit.zoo.judge import function  # noqa: F401  (what the zoo's reproducers import)
