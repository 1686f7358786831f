"""How fast the ops are on a GPU, beside their peers and the measured limits, and how calls are timed"""
