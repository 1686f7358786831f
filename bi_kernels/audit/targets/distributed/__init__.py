"""A decoder over several ranks: its steps cut by tensor, by data and by both, next to those of one rank"""
