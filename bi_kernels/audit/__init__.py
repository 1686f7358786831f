"""The auditor: does a token's result depend on what else was in the batch?"""
