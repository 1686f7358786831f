"""How cost and memory grow with the ranks, on paper: bytes that a rank receives, and what links need for them."""

from bi_kernels.audit.worlds.world import case
from bi_kernels.contract import CONTRACT
from bi_kernels.model import CONFIGS

BYTES, FP32 = 2, 4


def received(config, ranks: int) -> dict[str, float]:
    """Returns the bytes that a rank receives for a layer and a token, forward and backward, by gathering and by an
    all-reduce in a ring; and for a layer of a micro-batch, whatever its tokens, the weights cut another way."""
    width, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    share = BYTES * (ranks - 1) / ranks
    heads = 2 * (width + keys) if config.qk_norm else 0  # x and dy, of the weight's gradient
    forward = width + config.mlp + 2 * config.hidden
    backward = width + 2 * keys + heads + 2 * config.mlp + 2 * config.hidden
    weights = config.hidden * (2 * width + 2 * keys + 3 * config.mlp)
    reduced = 2 * 2 * config.hidden  # two all-reduces, each of which sends everything twice
    return {
        "forward, gathered": share * forward,
        "backward, gathered": share * backward,
        "forward, all-reduced": share * reduced,
        "backward, all-reduced": share * reduced,
        "weights": share * weights / ranks,
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
        of = received(config, tp)
        time = lambda what, link=link, of=of: of[what] * settings["tokens"] / link * 1e3
        recut = of["weights"] / link * 1e3
        joined = FP32 * numbers / tp * (dp - 1) / dp / (settings["network"] if ranks > settings["node"] else link)
        line = {
            "GPUs": ranks,
            "cut": f"tp {tp} × dp {dp}",
            "forward, ms": time("forward, gathered"),
            "all-reduced": time("forward, all-reduced"),
            "backward, ms": time("backward, gathered") + recut,
            "all-reduced ": time("backward, all-reduced"),
            "across nodes, forward, ms": time("forward, gathered", settings["network"]),
            "join a step, ms": joined * 1e3,
            "weights and fp32 gradients a GPU, GB": (BYTES + FP32) * numbers / tp / 1e9,
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
        of = received(CONFIGS[case(shapes)["model"]], int(cost["world"].removeprefix("tp")))
        tokens = timed["sequences"] * timed["length"]
        more = sum(of[f"{d}, gathered"] - of[f"{d}, all-reduced"] for d in which) * tokens
        more += of["weights"] * ("backward" in which)
        paper = more / CONTRACT["chain"]["world"]["growth"]["nvlink"] * 1e3
        ours, theirs = cost["ms"].values()
        took = (ours - theirs) / timed["layers"]
        said = {"world": cost["world"], "a layer's": " and ".join(which)}
        found.append(said | {"measured, ms more": f"{took:.3g}", "on paper, ms more": f"{paper:.3g}"})
    return found


def sentence(shapes: str) -> str:
    """Says where gathering moves more than reducing, and where it moves less."""
    config = CONFIGS["qwen3-8b" if shapes == "tiny" else case(shapes)["model"]]
    of = received(config, 8)
    forward = of["forward, gathered"] / of["forward, all-reduced"]
    backward = of["backward, gathered"] / of["backward, all-reduced"]
    more = lambda share: f"{share:.2f} times" + (" as much" if share > 1 else ", which is less")
    return (
        f"For a layer and a token, gathering moves {more(forward)} in the forward and {more(backward)} in the backward "
        "what two all-reduces in a ring do; besides, the weights of a layer are exchanged once a micro-batch, whatever "
        "its tokens."
    )
