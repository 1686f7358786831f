"""Worlds: a decoder's steps on one rank, and cut over several by tensor, by data and by both"""
