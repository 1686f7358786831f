"""Kernels, a file for an op or a few that are alike: kernel → launcher → autograd.Function → public function."""
