"""Finds the order in which a callable adds by probing it, and where two orders differ.

FPRev (Xie, Gao, Wang and Xue, arXiv 2411.00442): all terms are 1 except +M at i and −M at j. Each 1 that is added to
either before they meet is lost, so the result counts the terms outside of the lowest node that joins i and j; all pairs
give the whole tree. A step of the tensor core, which adds 16 products and the accumulator at once, is one node.

Assumptions: each term can be set to 1 and to ±M exactly; the result's format holds every integer up to n (bf16: 256);
M is above n · 2^p for an accumulator of p bits (the tensor core's has 26) and never overflows; the order does not
depend on the values. A sum of squares has no −M and cannot be probed. Kahan's compensation does not show.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pandas as pd
import torch

from bi_kernels.audit.compare import ordered
from bi_kernels.interpreter.tensor_core import mma
from bi_kernels.tokens import TokenLayout

MANY = 4096  # probes of a call, where the callable does not say how many it wants
LINES = 6  # of a table of where two orders differ
SHARED, OWN = "#0072B2", "#D55E00"


@dataclass(frozen=True)
class Tree:
    """steps[k] adds the numbers that it lists: i < n is a term, n + j the result of steps[j].

    Steps are sorted by size and first term, and their numbers by first term, so equal trees are equal objects.
    """

    n: int
    steps: tuple[tuple[int, ...], ...]

    def spans(self) -> list[np.ndarray]:
        """Returns the terms under every number: n single ones, then those of each step, ascending."""
        found = [np.array([i]) for i in range(self.n)]
        for step in self.steps:
            found.append(np.sort(np.concatenate([found[k] for k in step])))
        return found

    def partial_sums(self, terms: np.ndarray) -> np.ndarray:
        """Returns every number in fp32; a step of two rounds to nearest, one of more as sm_90's tensor core."""
        values = [np.float32(t) for t in terms]
        for step in self.steps:
            if len(step) == 2:
                values.append(values[step[0]] + values[step[1]])
                continue
            acc = next((k for k in step if k >= self.n), None)
            products = np.array([[values[k] for k in step if k != acc]], dtype=np.float32)
            start = np.array([[0 if acc is None else values[acc]]], dtype=np.float32)
            values.append(mma(products, np.ones_like(products.T), start, lowest=-126)[0, 0])
        return np.array(values, dtype=np.float32)

    def __str__(self) -> str:
        return self.text(self.n + len(self.steps) - 1)

    def text(self, node: int) -> str:
        """Returns how a number is summed, from left to right: a … b is one term after another, (…) is summed first, […]
        is added in one step with what stands before it."""
        spans, kinds, kind = self.spans(), {}, [0] * self.n
        for k, step in enumerate(self.steps):  # two nodes of one kind differ by a shift of their terms alone
            shape = tuple((int(spans[child][0] - spans[self.n + k][0]), kind[child]) for child in step)
            kind.append(kinds.setdefault(shape, len(kinds) + 1))

        def text(node: int) -> str:
            parts: list[tuple[int, ...]] = []  # along the larger part, from the last step down to the first
            while node >= self.n:
                step = self.steps[node - self.n]
                node = max(step, key=lambda k: (len(spans[k]), -k))
                other = max((k for k in step if k != node), key=lambda k: len(spans[k]))
                if len(spans[other]) == len(spans[node]) or (
                    other >= self.n and 4 * len(spans[other]) > len(spans[node]) and spans[other][0] < spans[node][0]
                ):  # neither is the sum so far
                    falls = parts and spans[parts[-1][0]][0] < spans[step[0]][0]
                    parts += [(k,) for k in (step if falls else step[::-1])] if len(step) == 2 else [step]
                    break
                parts.append(tuple(k for k in step if k != node))
            parts.reverse()
            lead = next((i for i, part in enumerate(parts) if max(part) >= self.n), len(parts))
            if 1 < lead < len(parts) and len(parts[lead]) == 1:
                return " + ".join([f"({' + '.join(runs(parts[:lead]))})", *runs(parts[lead:])])
            return " + ".join(runs(parts))

        def word(part: tuple[int, ...]) -> str:
            if len(part) > 1:
                nodes = [word((k,)) for k in part if k >= self.n]
                return f"[{', '.join([*nodes, *_range([k for k in part if k < self.n])])}]"
            return f"({text(part[0])})" if part[0] >= self.n else str(part[0])

        def runs(parts: list[tuple[int, ...]]) -> list[str]:
            words, at = [], 0
            starts, same = [spans[p[0]][0] for p in parts], [tuple(kind[k] for k in p) for p in parts]
            while at < len(parts):
                end = at + 1
                stride = starts[min(end, len(parts) - 1)] - starts[at]
                while end < len(parts) and same[end] == same[at] and starts[end] - starts[end - 1] == stride:
                    end += 1
                if end - at > 2 and same[at] == (0,):
                    words += _range([p[0] for p in parts[at:end]])
                elif end - at > 4:
                    words += [word(parts[at]), word(parts[at + 1]), "…", word(parts[end - 1])]
                else:
                    end = at + 1
                    words.append(word(parts[at]))
                at = end
            return words

        return text(node) or str(node)


def _range(terms: Sequence[int]) -> list[str]:
    """Returns ['3'], ['0 … 15'], ['0, 8 … 56'], or ['5 of 0 … 9'] for unequal gaps; [] for no terms."""
    gaps = {int(b - a) for a, b in zip(terms, terms[1:])}
    if len(terms) < 2:
        return [str(t) for t in terms]
    if len(gaps) > 1:
        return [f"{len(terms)} of {terms[0]} … {terms[-1]}"]
    return [f"{terms[0]} … {terms[-1]}" if gaps <= {-1, 1} else f"{terms[0]}, {terms[1]} … {terms[-1]}"]


def order(
    sums: Callable[[torch.Tensor], torch.Tensor], n: int, at_once: int = 0, big: float = 2.0**100, unit: float = 1.0
) -> Tree:
    """Returns the tree by which `sums` adds n terms.

    sums(values (probes, n) fp32) -> (probes,) sums each row in the same order; `over_k` and `over_tokens` make one.
    at_once: the rows of each call, filled up with zeros, where the order may depend on it. big, unit: M and the term
    that it swallows, for formats that cannot hold 2^100 (fp16: 2^15 and 2^-24). Raises ValueError if no tree explains
    the results.
    """
    first, second = np.triu_indices(n, 1)
    rows = at_once or min(MANY, len(first)) or 1
    answers = lambda values: torch.as_tensor(sums(values)).detach().cpu().double().numpy() / unit
    ones = answers(torch.full((rows, n), unit)).flat[0]
    if not abs(ones - n) < 0.25:
        raise ValueError(f"order: {n} ones gave {ones:g}, expected {n}: they are not what is added, or not all of it")
    lost = np.eye(n, dtype=np.int64)  # how many terms are under the node that joins i and j
    for at in range(0, len(first), rows):
        i, j = first[at : at + rows], second[at : at + rows]
        values = torch.zeros(rows, n)
        values[: len(i)] = unit
        values[np.arange(len(i)), i], values[np.arange(len(i)), j] = big, -big
        counted = answers(values)[: len(i)]
        wrong = ~(np.abs(counted - counted.round().clip(0, n - 2)) < 0.25)
        if wrong.any():
            k = wrong.argmax()
            raise ValueError(
                f"order: +M at {i[k]} and −M at {j[k]} left {counted[k]:g}, expected a count of the other {n - 2} "
                "terms: M or a sum with it overflows, or a term is not added as it was given"
            )
        lost[i, j] = lost[j, i] = n - counted.round()
    return _tree(lost)


def over_k(linear: Callable, dtype: torch.dtype = torch.bfloat16) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns `sums` for `order`: the sum over K in linear(x, weight), a probe in each row of x, a weight of ones."""
    return lambda values: linear(values.to(dtype), torch.ones(1, values.shape[1], dtype=dtype))[:, 0].float()


def over_tokens(
    op: Callable, micro_batches: Sequence[Sequence[int]], **constants
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns `sums` for `order`: the sum over a step's tokens in the weight's gradient of op(x, weight, **constants).

    micro_batches: the lengths of the sequences in each call of the step. dy holds a probe in each feature; x holds
    ones, which a norm leaves unchanged if its eps is 0. The gradient is read from main_grad, or else from .grad.
    """

    def sums(values: torch.Tensor) -> torch.Tensor:
        weight, at = torch.ones(len(values), requires_grad=True), 0
        weight.main_grad = torch.zeros(len(values))
        for lengths in micro_batches:
            dy = values.T[at : at + sum(lengths)].contiguous()
            at += len(dy)
            with TokenLayout.packed([0, *accumulate(lengths)]):
                y = op(torch.ones_like(dy), weight, **constants)
            y.backward(dy)
        return weight.main_grad if weight.grad is None else weight.grad

    return sums


def _tree(lost: np.ndarray) -> Tree:
    n = len(lost)
    nodes = {
        (int(size), int(np.argmax(row <= size))): row <= size for row in lost for size in np.unique(row) if size > 1
    }
    top, steps, joined = np.arange(n), [], np.eye(n, dtype=np.int64)
    for _, under in sorted(nodes.items(), key=lambda node: node[0]):
        steps.append(tuple(int(k) for k in dict.fromkeys(top[under])))
        top[under] = n + len(steps) - 1
    tree = Tree(n, tuple(steps))
    for under in reversed(tree.spans()[n:]) if all(len(s) > 1 for s in steps) and len(set(top)) == 1 else ():
        joined[np.ix_(under, under)] = len(under)
    np.fill_diagonal(joined, 1)
    if not np.array_equal(joined, lost):
        i, j = np.argwhere(joined != lost)[0]
        raise ValueError(
            f"order: +M at {i} and −M at {j} lost {lost[i, j]} of {n} terms, which no tree does together with the "
            "other pairs: the sum compensates, reads M differently, or changes its order with the call"
        )
    return tree


def first_divergence(a: Tree, b: Tree, terms: np.ndarray, names: Sequence[str] = ("a", "b")) -> pd.DataFrame:
    """Replays both trees in fp32 on the same terms: a table of where they first differ, and by how many ULP they end.

    A line is a partial sum, ordered by its last term: its terms, how each tree sums them ("–" where it never does), its
    value. A run of single additions is one line while nothing differs. The table starts at the last line on which both
    agree, and has LINES lines and the end.
    """
    trees = (a, b)
    values = [tree.partial_sums(terms) for tree in trees]
    inside = [{k for step in tree.steps if len(step) == 2 and min(step) < tree.n for k in step} for tree in trees]
    nodes = [{tuple(under): k for k, under in enumerate(tree.spans()) if k >= tree.n} for tree in trees]
    found = []
    for under in sorted({*nodes[0], *nodes[1]}, key=lambda under: (under[-1], len(under), under)):
        made = [known.get(under) for known in nodes]  # by each tree, if it is
        ulp = "–" if None in made else int(ordered(torch.tensor([v[k] for v, k in zip(values, made)])).diff().abs())
        if ulp not in (0, "–") or any(k not in run for k, run in zip(made, inside) if k is not None):
            found.append((under, made, ulp))
    part = next((i for i, (*_, ulp) in enumerate(found) if ulp != 0), len(found))
    shown = sorted({*range(max(0, part - 1), min(part + LINES, len(found))), len(found) - 1})
    frame = []
    for under, made, ulp in (found[i] for i in shown):
        line = {"sum over": _range(under)[0]}
        for name, tree, value, k in zip(names, trees, values, made):
            line[f"{name} adds"], line[name] = ("–", "–") if k is None else (tree.text(k), f"{value[k]:.9g}")
        frame.append(line | {"ULP": ulp})
    return pd.DataFrame(frame)


def draw(trees: dict[str, Tree], title: str, marks: Sequence[int] = (), xlabel: str = "term"):
    """Returns a matplotlib figure with a panel for each tree: terms from left to right, a bracket for each sum.

    A bracket's height is its depth in additions. Sums that all trees form alike are blue, others orange. marks: terms
    before which a line is drawn.
    """
    import matplotlib.pyplot as plt  # noqa: PLC0415 (a second, which stepping does not need)
    from matplotlib.collections import LineCollection  # noqa: PLC0415 (likewise)

    known: dict[tuple, int] = {}
    numbers = {}  # of every node, equal where what is under it is added in the same order
    for name, tree in trees.items():
        same = list(range(tree.n))
        for step in tree.steps:
            same.append(known.setdefault(tuple(same[k] for k in step), -1 - len(known)))
        numbers[name] = same
    shared = set.intersection(*map(set, numbers.values()))
    figure, axes = plt.subplots(len(trees), 1, figsize=(9, 0.6 + 2.1 * len(trees)), sharex=True, squeeze=False)
    for ax, (name, tree) in zip(axes[:, 0], trees.items()):
        x, height, segments, colors = [*range(tree.n)], [0] * tree.n, [], []
        for node, step in enumerate(tree.steps, tree.n):
            y = 1 + max(height[k] for k in step)
            xs = [x[k] for k in step]
            segments += [[(min(xs), y), (max(xs), y)], *([(x[k], height[k]), (x[k], y)] for k in step)]
            colors += [SHARED if numbers[name][node] in shared else OWN] * (1 + len(step))
            x.append(float(np.mean(xs)))
            height.append(y)
        ax.add_collection(LineCollection(segments, colors=colors, linewidths=1.2))
        ax.plot(range(tree.n), [0] * tree.n, ".", color="#444444", markersize=2.5)
        for mark in marks:
            ax.axvline(mark - 0.5, color="#888888", linewidth=0.9, linestyle="--")
        ax.set(ylim=(-0.04 * max(height), 1.08 * max(height) + 0.1), ylabel="additions deep")
        ax.text(0.01, 0.94, name, transform=ax.transAxes, va="top", fontsize=9, fontweight="bold")
    axes[0, 0].set_title(title)
    axes[-1, 0].set(xlabel=xlabel, xlim=(-1, max(tree.n for tree in trees.values())))
    figure.tight_layout()
    return figure
