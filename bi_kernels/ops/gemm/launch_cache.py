"""Remembers how products were computed of which nothing has to be copied, so that the next of a kind takes a lookup."""

import threading
from collections.abc import Callable

import torch

KINDS = 4096  # kept by a thread
_thread = threading.local()


def kind_of(x, w, bias, out_dtype: torch.dtype | None) -> tuple:
    """Returns what a product x wᵀ + bias is told apart by; the addresses of its tensors are multiples of 16."""
    kind = x.dtype, out_dtype or x.dtype, x.device, x.shape, w.shape, x.stride(), w.stride()
    return kind if bias is None else (*kind, bias.dtype)


def remember(kind: tuple, run: Callable) -> None:
    """Remembers what computes products of a kind from x, w and bias in this thread; None where it cannot."""
    runs = _thread.__dict__
    if len(runs) >= KINDS:
        runs.clear()
    runs[kind] = run


def remember_view(x, flat, w, bias, out_dtype: torch.dtype | None) -> None:
    """Remembers for x (…, K), contiguous, what computes products of its view `flat` (M, K)."""
    run, shape, lead = _thread.__dict__.get(kind_of(flat, w, bias, out_dtype)), flat.shape, (*x.shape[:-1], len(w))
    if run is not None:  # resized and no view, which could not be written in place under autograd
        remember(kind_of(x, w, bias, out_dtype), lambda x, w, bias: run(x.view(shape), w, bias).resize_(lead))


def cached_launch(x, w, bias, out_dtype: torch.dtype | None) -> torch.Tensor | None:
    """Returns the product, if one of its kind was computed before; None of others."""
    run = _thread.__dict__.get(kind_of(x, w, bias, out_dtype))
    low = x.data_ptr() | w.data_ptr() | (0 if bias is None else bias.data_ptr())
    return None if run is None or low % 16 or not (bias is None or bias.is_contiguous()) else run(x, w, bias)
