"""Models on paper how cost and memory grow with the ranks: bytes that a rank receives, and the time links need."""

from bi_kernels.audit.targets.distributed.step import case
from bi_kernels.contract import CONTRACT
from bi_kernels.model import CONFIGS
from bi_kernels.parallel.peers import SLOTS

BYTES, FP32 = 2, 4


def received(config, ranks: int, tokens: int) -> dict[str, float]:
    """Returns the bytes that a rank receives for a layer of a micro-batch of so many tokens, forward and backward, by
    gathering as parallel/products.py does, and by an all-reduce in a ring."""
    width, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    share, hidden = BYTES * (ranks - 1) / ranks, config.hidden
    joined = tokens * 2 * hidden  # what the products of o and down are, or the gradients of what q, k, v, gate, up take
    forward = [min(tokens * k, tokens * k / ranks + hidden * k) for k in (width, config.mlp)]
    of_parts, of_whole = width + config.mlp, width + 2 * keys + 2 * config.mlp
    heads = 2 * (width + keys) if config.qk_norm else 0  # x and dy, of the weight's gradient
    backward = tokens * ((of_whole + heads) / ranks + of_parts) + hidden * (of_whole + of_parts / ranks)
    reduced = 2 * 2 * hidden * tokens  # two all-reduces, each of which sends everything twice
    return {
        "forward, gathered": share * (joined + sum(forward)),
        "backward, gathered": share * (joined + backward),
        "forward, all-reduced": share * reduced,
        "backward, all-reduced": share * reduced,
    }


def table(shapes: str) -> list[dict]:
    """Returns a line for each number of ranks: how they are cut, what a rank receives, how long the links need for it,
    and what it holds."""
    settings = CONTRACT["chain"]["world"]["growth"]
    config = CONFIGS["qwen3-8b" if shapes == "tiny" else case(shapes)["model"]]
    width, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.hidden * (2 * width + 2 * keys + 3 * config.mlp)
    numbers = config.layers * layer + 2 * config.vocab * config.hidden
    found = []
    for ranks in settings["ranks"]:
        tp = min(ranks, settings["node"])
        dp, link = ranks // tp, settings["nvlink"]
        of = received(config, tp, settings["tokens"])
        time = lambda what, link=link, of=of: of[what] / link * 1e3
        joined = FP32 * numbers / tp * (dp - 1) / dp / (settings["network"] if ranks > settings["node"] else link)
        line = {
            "GPUs": ranks,
            "cut": f"tp {tp} × dp {dp}",
            "forward, ms": time("forward, gathered"),
            "all-reduced": time("forward, all-reduced"),
            "backward, ms": time("backward, gathered"),
            "all-reduced ": time("backward, all-reduced"),
            "across nodes, forward, ms": time("forward, gathered", settings["network"]),
            "join a step, ms": joined * 1e3,
            "weights and fp32 gradients a GPU, GB": (BYTES + FP32) * numbers / tp / 1e9,
            "on their way, GB": SLOTS * BYTES * settings["tokens"] * config.mlp / 1e9,  # x of down, of all ranks
            "masters and moments, sharded, GB": 3 * FP32 * numbers / tp / dp / 1e9,
        }
        found.append({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in line.items()})
    return found


def measured(costs: list[dict], shapes: str) -> list[dict]:
    """Returns a line for each world's forward, and forward with backward, that was timed: by how much a layer took
    longer than by all-reduces, and by how much it should on paper; none where nothing was timed."""
    timed, found = case(shapes).get("timed", {}), []
    directions = {"forward": ("forward",), "forward and backward": ("forward", "backward")}
    for cost in costs:
        which = directions.get(cost["what"].removeprefix("tensor parallel, "))
        if which is None:
            continue
        tokens = cost["tokens"]
        of = received(CONFIGS[case(shapes)["model"]], int(cost["world"].removeprefix("tp")), tokens)
        more = sum(of[f"{d}, gathered"] - of[f"{d}, all-reduced"] for d in which)
        paper = more / CONTRACT["chain"]["world"]["growth"]["nvlink"] * 1e3
        ours, theirs = cost["ms"].values()
        took = (ours - theirs) / timed["layers"]
        said = {"world": cost["world"], "a layer's": " and ".join(which), "tokens": tokens}
        found.append(said | {"measured, ms more": f"{took:.3g}", "on paper, ms more": f"{paper:.3g}"})
    return found


def sentence(shapes: str) -> str:
    """Says where gathering moves more than reducing, and where it moves less."""
    config = CONFIGS["qwen3-8b" if shapes == "tiny" else case(shapes)["model"]]
    tokens = CONTRACT["chain"]["world"]["growth"]["tokens"]
    more = lambda share: f"{share:.2f} times" + (" as much" if share > 1 else ", which is less")

    def said(ranks: int) -> str:
        of = received(config, ranks, tokens)
        shares = (of[f"{d}, gathered"] / of[f"{d}, all-reduced"] for d in ("forward", "backward"))
        return "{} in the forward and {} in the backward".format(*map(more, shares))

    return (
        f"For a layer and {tokens} tokens, beside two all-reduces in a ring, gathering moves over 2 ranks {said(2)}; "
        f"over 8 {said(8)}. Of a product's input and its weight that one is sent "
        "which is less, and the weight's size does not grow with the tokens."
    )
