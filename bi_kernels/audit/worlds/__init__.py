"""Worlds: one decoder's step on one GPU, and cut over ranks by tensor and by data, each rank a process"""
