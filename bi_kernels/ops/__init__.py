"""Kernels, one file an op: kernel → launcher → autograd.Function → public function."""
