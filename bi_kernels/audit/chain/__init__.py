"""A whole model: one hash over every layout, what it generates and rescores, and what training makes of it"""
