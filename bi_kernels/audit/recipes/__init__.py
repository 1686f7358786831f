"""Recipes: what others do to keep cuBLAS from splitting K, where each still drifts with M, and what it costs"""
