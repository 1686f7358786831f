"""SHA-256 of output bits: golden ones of this package's ops, and those that a user keeps of a candidate."""
