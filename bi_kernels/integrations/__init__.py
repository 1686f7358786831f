"""Models of other libraries on these kernels, each an optional extra."""
