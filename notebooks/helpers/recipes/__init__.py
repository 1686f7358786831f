"""Compares cuBLAS settings that keep it from splitting K: where each still drifts with M, and what it costs."""
