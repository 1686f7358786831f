"""Certifies that a rollout engine and a trainer recorded the same logprobs of the same tokens."""
