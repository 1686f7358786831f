"""A run of audits: processes, notebooks and their folder, the quick run, and what a terminal and a CI are told"""
