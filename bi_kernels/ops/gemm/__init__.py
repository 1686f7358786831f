"""GEMM: one fold over K, by whichever program is the cheapest: cuBLASLt's, our own for sm_90 in Gluon, or Triton's."""
