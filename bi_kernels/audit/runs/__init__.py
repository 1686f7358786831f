"""A run of audits: its folder, its notebooks, how long they may take, and the quick run without notebooks"""
