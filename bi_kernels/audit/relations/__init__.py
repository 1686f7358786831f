"""The questions, each judged on its own: invariance, determinism, accuracy and parity, forward and of every
gradient."""
