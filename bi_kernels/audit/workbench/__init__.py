"""A kernel in a notebook's cell: run, read, audited and written out; and the order in which it adds."""
