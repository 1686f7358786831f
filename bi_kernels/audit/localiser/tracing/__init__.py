"""Records a run: every op with digests of what it reads and writes, in any layout of a batch."""
