"""The questions, each judged on its own: invariance, determinism, accuracy, parity; and the same of gradients."""
