"""Fresh memory that holds known numbers: an element that a candidate leaves unwritten, or writes behind, shows."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch

from bi_kernels.compat import is_fake

FENCE, FENCED = 8192, 0xA5  # bytes behind fresh memory, and what they hold
MOST = 2**26  # bytes of a GPU's memory that have some behind them


@contextlib.contextmanager
def of_candidate() -> Iterator[None]:
    """Marks what is raised as the candidate's own."""
    try:
        yield
    except Exception as error:
        error.of_candidate = True
        raise


@contextlib.contextmanager
def poisoned_memory(call: int) -> Iterator[None]:
    """Fills what torch.empty, empty_like and new_empty return, with ones in a call of odd number and zeros in another,
    so that an element left unwritten is seen. There is room behind each, but for large ones and graphs on a GPU: raises
    RuntimeError where something was written there."""
    fenced: list[tuple[torch.UntypedStorage, int]] = []

    def wrap(make):
        def filled(*args, **kwargs):
            t = make(*args, **kwargs)
            if t.device.type != "meta" and not is_fake(t) and t.is_contiguous():
                if t.nbytes and _has_room(t):
                    storage, size = torch.UntypedStorage(t.nbytes + FENCE, device=t.device), t.nbytes
                    storage.fill_(FENCED)
                    fenced.append((storage, size))
                    t = t.detach().set_(storage, 0, t.shape, t.stride())
                t.as_strided((t.numel(),), (1,)).view(torch.uint8).fill_(0xFF if call % 2 else 0x00)
            return t

        return filled

    with contextlib.ExitStack() as replaced:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            replaced.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
        yield
    for storage, size in fenced:
        behind = torch.tensor((), dtype=torch.uint8, device=storage.device).set_(storage, size, (FENCE,))
        if bool((behind != FENCED).any()):
            raise RuntimeError(f"the candidate wrote behind the {size} bytes of memory that it asked for")


def _has_room(t: torch.Tensor) -> bool:
    return t.device.type == "cpu" or t.nbytes <= MOST and not torch.cuda.is_current_stream_capturing()
