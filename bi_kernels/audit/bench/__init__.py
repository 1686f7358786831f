"""How calls are timed on a GPU, and what a launch costs the CPU."""
