"""Run by tests/test_tensor_parallel.py on each rank, or alone: a small Qwen3 and a Llama after `apply`, over ranks.

Each rank writes {model: {what: SHA-256}}.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from ranks_tensor import sha
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bi_kernels.grads import MainGrads
from bi_kernels.integrations.transformers import apply, logprobs, restore

SIZES = {"vocab_size": 9000, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
MODELS = {
    "qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen3, one key head": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_key_value_heads": 1})),
    "llama, biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=False)),
}


def found(make, group: dist.ProcessGroup | None) -> dict[str, str]:
    torch.manual_seed(0)
    model = make().bfloat16()
    before = {name: sha(p) for name, p in model.named_parameters()}
    apply(model, group)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SIZES["vocab_size"], (3, 13), generator=g)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    said = {}
    for number in range(2):  # micro-batches, whose folds go on
        out = model(ids + number, attention_mask=mask, labels=(ids + number).masked_fill(mask == 0, -100))
        out.loss.backward()
        said |= {f"loss {number}": sha(out.loss), f"logits {number}": sha(out.logits)}
    model.gradient_checkpointing_enable()
    model.train()
    scores = logprobs(model, ids, mask, temperature=0.7)
    (scores[0].sum() + 0.1 * scores[1].sum()).backward()
    said |= {"logprob": sha(scores[0]), "entropy": sha(scores[1])}
    model.eval()
    with torch.no_grad():
        new = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        again = model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, cache_implementation="static"
        )
    said["generated"] = str((new.tolist(), again.tolist()))
    restore(model)
    said |= {f"gradient of {name}": sha(p.grad) for name, p in model.named_parameters()}
    assert {name: sha(p) for name, p in model.named_parameters()} == before, "restore gives the weights back whole"
    return said


def trained(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Steps of an applied model whose groups of sequences one tree joins: over the ranks of a weight, or of a step."""
    said = {}
    for cut in ("tensor", "data"):
        torch.manual_seed(0)
        model = MODELS["qwen3, tied"]().bfloat16()
        before = [sha(p) for p in model.parameters()]
        apply(model, group if cut == "tensor" else None)
        world = {"world": group} if group and cut == "data" else {}
        grads = MainGrads(model.parameters(), tied=[model.lm_head.weight], groups=3, **world)
        optimizer = torch.optim.AdamW(grads.masters, lr=0.01)
        for step in range(2):
            for number in grads.mine:
                ids = torch.randint(
                    1, SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(number + step)
                )
                (-logprobs(model, ids)[0].sum() / 54).backward()
                assert all(p.grad is None for p in model.parameters())
                grads.close(number)
            grads.join()
            optimizer.step()
            grads.finish()
        restore(model)
        assert all(sha(p) != was for p, was in zip(model.parameters(), before)), "every weight is trained"
        said |= {f"{cut}, weight {name}": sha(p) for name, p in model.named_parameters()}
    return said


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    said = {}
    for what, sizes in (
        ("heads", {"num_attention_heads": 1, "num_key_value_heads": 1}),
        ("rows", {"intermediate_size": 47}),
    ):
        model = LlamaForCausalLM(LlamaConfig(**SIZES | sizes))
        kinds = [type(m) for m in model.modules()]
        try:
            apply(model, group)
        except ValueError as error:
            same = kinds == [type(m) for m in model.modules()] and not any(
                hasattr(p, "cut") for p in model.parameters()
            )
            said[what] = str(error) if same else "something was replaced"
    return said


def main(folder: Path) -> None:
    group = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    said = {name: found(make, group) for name, make in MODELS.items()} | {"trained": trained(group)}
    if group:
        said["refused"] = refused(group)
    (folder / f"{dist.get_rank() if group else 'one'}.json").write_text(json.dumps(said))
    if group:
        dist.barrier()
        dist.destroy_process_group()
