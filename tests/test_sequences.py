"""`audit` of whole models: a sample is a sequence with its mask, padded either way, packed, alone, and from a cache."""

import pytest
import torch

from bi_kernels.audit import audit
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, UNSUPPORTED

G = torch.Generator().manual_seed(0)
IDS = torch.randint(1, 50, (4, 9), generator=G)
LENGTHS = torch.tensor([9, 4, 6, 7])
MASK = (torch.arange(9) < LENGTHS[:, None]).long()


class Model(torch.nn.Module):
    """Embedding, one causal attention whose keys are added one after another, and logits; faults by name."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.fault = fault
        self.register_buffer("table", torch.randn(50, 16, generator=torch.Generator().manual_seed(1)))

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False):
        start = 0 if past_key_values is None else past_key_values[0].shape[1]
        places = torch.arange(start, start + input_ids.shape[1])
        own = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        at = places.expand(input_ids.shape) if position_ids is None else position_ids
        packed = position_ids is not None and attention_mask is None and self.fault != "not packed"
        sequence = (at == 0).cumsum(1) if packed else torch.zeros_like(input_ids)
        x = self.table[input_ids] * (1 + at[..., None] * 0.1).cos()
        keys, seen, key_sequence = x, own.bool(), sequence
        if past_key_values is not None:
            keys = torch.cat((past_key_values[0], x), 1)
            seen, key_sequence = (keys.new_ones(keys.shape[:2], dtype=dtype) for dtype in (torch.bool, torch.long))
            sequence = torch.ones_like(input_ids)
        visible = (torch.arange(keys.shape[1]) <= places[:, None]) & seen[:, None]
        visible = visible & (key_sequence[:, None] == sequence[..., None])
        scores = (x[:, :, None] * keys[:, None] * 0.1).double().sum(-1).float().exp().masked_fill(~visible, 0)
        order = list(range(keys.shape[1]))
        if (self.fault == "decode" and start) or (self.fault == "width" and keys.shape[1] > 9):
            order = order[::-1]
        total, weight = torch.zeros_like(x), torch.zeros(x.shape[:2])
        for k in order:
            total, weight = total + scores[:, :, k, None] * keys[:, k, None], weight + scores[:, :, k]
        out = {"logits": total / weight[..., None]}
        return out | ({"past_key_values": (keys,)} if use_cache else {})


@pytest.mark.parametrize(
    "fault, broken",
    [
        ("", set()),
        ("decode", {"decode"}),
        ("width", {"right_padded", "left_padded sequences", "packed"}),
        ("not packed", set()),
    ],
)
def test_a_model_is_judged_on_whole_sequences(fault, broken):
    report = audit(Model(fault).bfloat16().float(), IDS, MASK, backward=False)
    asked = {r.layout: r.verdict for r in report.rows}
    assert {"unpadded", "right_padded", "left_padded sequences", "packed", "decode"} <= set(asked), report.markdown()
    assert {r.layout for r in report.rows if r.verdict == NEEDS_FIX} == broken, report.markdown()
    assert (asked["packed"] == UNSUPPORTED) == (fault == "not packed")


def test_the_dtype_is_that_of_the_parameters_where_the_inputs_are_ids():
    assert {r.dtype for r in audit(torch.nn.Embedding(50, 8).bfloat16(), IDS).rows} == {"bf16"}
