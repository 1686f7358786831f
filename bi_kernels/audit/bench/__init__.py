"""Speed: how calls are timed, what is timed of every op beside its peers, and what is said of it."""
