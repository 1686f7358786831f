"""Attention: one fold of the keys for prefill, chunks and decode; on sm_90 in Gluon besides, with the same bits."""
