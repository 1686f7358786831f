"""The checks of one call made in other ways: its mode, the gradients requested, memory, the calls before."""
