"""Attention: one summation order for prefill, chunks and decode; on sm_90 in Gluon besides, with the same bits."""
