"""Run by tests/test_main_grads.py, or alone: steps of a small decoder, saved after each, that goes on where it was.

resumed.py FILE KILL      # ends by SIGKILL within step KILL, unless it is −1; prints the SHA-256 of all that is left
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch

from bi_kernels import MainGrads
from bi_kernels.model import CONFIGS, Decoder, packed

STEPS, LENGTHS = 3, [5, 9]


class Run:
    """A training run. seed: of the weights that it begins with; given: what MainGrads is told besides."""

    def __init__(self, seed: int = 0, **given):
        self.model = Decoder(CONFIGS["world"], seed=seed)
        self.grads = MainGrads(self.model.named_parameters(), self.model.tied, **given)
        self.optimizer = torch.optim.AdamW(self.grads.masters, lr=2.0**-6)
        self.done = 0

    def backward(self) -> None:
        for group in self.grads.mine:
            g = torch.Generator().manual_seed(100 * self.done + group)
            ids, targets = torch.randint(0, self.model.config.vocab, (2, sum(LENGTHS)), generator=g)
            self.model.logprobs(ids, targets, packed(LENGTHS, "cpu"))[0].sum().neg().backward()
            self.grads.close(group)

    def step(self) -> None:
        self.backward()
        self.grads.join()
        self.grads.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.grads.finish()
        self.done += 1

    def state(self) -> dict:
        return {"done": self.done, "grads": self.grads.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict) -> None:
        self.grads.load_state_dict(state["grads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]

    def digest(self) -> str:
        every = [*self.model.parameters(), *self.grads.masters]
        return hashlib.sha256(b"".join(t.detach().view(torch.uint8).numpy().tobytes() for t in every)).hexdigest()


def main(file: Path, kill: int) -> None:
    run = Run(seed=int(file.exists()))  # what it begins with is of no account where it goes on
    if file.exists():
        run.load(torch.load(file))
    while run.done < STEPS:
        if run.done == kill:
            run.backward()
            os.kill(os.getpid(), signal.SIGKILL)
        run.step()
        torch.save(run.state(), file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)
    print(run.digest())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
