"""What is asked: the registry of ops, their inputs, the layouts of a call, and the candidate that is judged."""
