"""Attention's kernels for sm_90, in Gluon: prefill and both halves of the backward, of the same bits as Triton's."""
