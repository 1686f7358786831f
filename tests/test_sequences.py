"""`audit` of whole models: a sample is a sequence with its mask, padded either way, packed, alone, and from a cache."""

import pytest
import torch
from conftest import slow_but

import bi_kernels
from bi_kernels.audit import audit, start
from bi_kernels.audit.findings import INVARIANCE, NEEDS_FIX, UNSUPPORTED

G = torch.Generator().manual_seed(0)
IDS = torch.randint(1, 50, (4, 9), generator=G)
LENGTHS = torch.tensor([9, 4, 6, 7])
MASK = (torch.arange(9) < LENGTHS[:, None]).long()


class Model(torch.nn.Module):
    """Embedding, one causal attention whose keys are added one after another, a norm, and a score of each sequence;
    faults by name."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.fault = fault
        self.register_buffer("table", torch.randn(50, 16, generator=torch.Generator().manual_seed(1)))
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, 16))

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False):
        start = 0 if past_key_values is None else past_key_values[0].shape[1]
        places = torch.arange(start, start + input_ids.shape[1])
        own = torch.ones(len(input_ids), start + input_ids.shape[1]) if attention_mask is None else attention_mask
        at = places.expand(input_ids.shape) if position_ids is None else position_ids
        packed = position_ids is not None and attention_mask is None and self.fault != "not packed" and not start
        sequence = (at == 0).cumsum(1) if packed else torch.zeros_like(input_ids)
        x = self.table[input_ids] * (1 + at[..., None] * 0.1).cos()
        keys = x if past_key_values is None else torch.cat((past_key_values[0], x), 1)
        visible = (torch.arange(keys.shape[1]) <= places[:, None]) & own.bool()[:, None]
        if packed:
            visible = visible & (sequence[:, None] == sequence[..., None])
        scores = (x[:, :, None] * keys[:, None] * 0.1).double().sum(-1).float().exp().masked_fill(~visible, 0)
        order = list(range(keys.shape[1]))
        turned = {
            "decode": start,
            "width": keys.shape[1] > 9,
            "far": keys.shape[1] > 100,
            "chunks": start and input_ids.shape[1] > 1,
            "together": start and len(input_ids) > 1,
        }
        if turned.get(self.fault):
            order = order[::-1]
        total, weight = torch.zeros_like(x), torch.zeros(x.shape[:2])
        for k in order:
            total, weight = total + scores[:, :, k, None] * keys[:, k, None], weight + scores[:, :, k]
        hidden = total / (weight + 2**-30)[..., None]
        y = hidden * self.weight if self.fault == "gradient" else bi_kernels.rms_norm(hidden, self.weight)
        last = own[:, start:].long().cumsum(1).argmax(1)
        score = y.gather(1, last[:, None, None].expand(-1, 1, 16))[:, 0, 0]
        if self.fault == "score" and input_ids.shape[1] > 9:
            score = score * (1 + 2**-20)
        out = {"logits": y, "score": score}
        return out | ({"past_key_values": (keys,)} if use_cache else {})


LEFT, LEFT_FAR, TOGETHER = "left_padded sequences", "left_padded sequences far", "decode of left-padded prompts"
WIDER = {"right_padded", "right_padded far", LEFT, LEFT_FAR}
LAYOUTS = WIDER | {"unpadded", "packed", "decode", "decode, 3 tokens a call", TOGETHER}


@pytest.mark.parametrize(
    "fault, broken",
    slow_but(
        [
            ("", set()),
            ("decode", {"decode", "decode, 3 tokens a call", TOGETHER}),
            ("width", WIDER | {"packed", TOGETHER}),
            ("far", {"right_padded far", LEFT_FAR}),
            ("chunks", {"decode, 3 tokens a call"}),
            ("together", {TOGETHER}),
            ("score", WIDER),
            ("not packed", set()),
        ],
        "width",
        "decode",
    ),
)
def test_a_model_is_judged_on_whole_sequences(fault, broken):
    report = audit(Model(fault), IDS, MASK, backward=False)
    asked: dict[str, set] = {}
    for r in report.rows:
        asked.setdefault(r.layout, set()).add(r.verdict)
    assert set(asked) >= LAYOUTS, report.markdown()
    assert {r.layout for r in report.rows if r.verdict == NEEDS_FIX} == broken, report.markdown()
    assert (UNSUPPORTED in asked["packed"]) == (fault == "not packed")


@pytest.mark.parametrize("fault, broken", [("", set()), ("gradient", {"right_padded", LEFT})])
def test_the_gradients_of_a_model_are_judged_under_other_padding(fault, broken):
    report = audit(Model(fault), IDS, MASK)
    mine = [r for r in report.rows if r.relation == INVARIANCE and r.layout in WIDER]
    assert {r.layout for r in mine} == {"right_padded", LEFT}, report.markdown()
    assert {r.layout for r in mine if r.verdict == NEEDS_FIX} == broken, report.markdown()
    assert fault or report.passed, report.markdown()


class Strict(Model):
    """Takes no call without a mask."""

    def forward(self, input_ids, attention_mask, position_ids=None, past_key_values=None, use_cache=False):
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache)


class Unplaced(torch.nn.Module):
    """Takes a mask and no places, which its tokens have of their own."""

    def __init__(self):
        super().__init__()
        self.inner = Model()

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids, attention_mask)["logits"]


@pytest.mark.slow
def test_what_a_model_needs_it_is_given_and_what_it_cannot_know_is_no_drift():
    assert audit(Strict(), IDS, MASK, backward=False).passed
    report = audit(Unplaced(), IDS, MASK, backward=False)
    assert report.passed, report.markdown()
    (left,) = (r for r in report.rows if r.layout == LEFT)
    assert left.verdict == UNSUPPORTED and "no position_ids" in left.detail


class LastPlace(Model):
    """Scores a sequence by its last place, which on the right is padding."""

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return super().forward(input_ids, attention_mask, position_ids)["logits"][:, -1]


@pytest.mark.slow
def test_what_is_pooled_at_the_other_end_is_no_drift():
    report = audit(LastPlace(), IDS, backward=False)
    verdicts = {r.layout: r.verdict for r in report.rows}
    assert report.passed and verdicts["right_padded"] == UNSUPPORTED != verdicts[LEFT], report.markdown()


class Short(Model):
    """Has places for a few tokens, returns its cache and its heads' weights in a tuple, and takes no empty call."""

    def __init__(self):
        super().__init__()
        self.places = torch.nn.Embedding(20, 16)

    def forward(self, input_ids, attention_mask=None):
        y = super().forward(input_ids, attention_mask)["logits"]
        y = y + self.places(torch.arange(input_ids.shape[1]))
        weights = torch.ones(len(input_ids), 2, *input_ids.shape[1:] * 2)
        return y, weights, ((torch.zeros(len(input_ids), 2, input_ids.shape[1], 8),) * 2,)


def test_what_grows_with_the_width_and_places_that_end_are_no_drift():
    report = audit(Short(), IDS, MASK, backward=False)
    (far,) = (r for r in report.rows if r.layout == "right_padded far")
    assert report.passed and far.verdict == UNSUPPORTED and "out of range" in far.detail, report.markdown()


def test_a_model_has_a_control_of_its_sequences(tmp_path):
    file = tmp_path / "models.py"
    file.write_text(
        "import torch\n\nclass Mean(torch.nn.Module):\n"
        "    def forward(self, input_ids, attention_mask=None):\n        return input_ids[..., None] * 0.5\n\n"
        "mean = Mean()\n\ndef inputs():\n    ids = torch.arange(36).view(4, 9)\n"
        "    return {'input_ids': ids, 'attention_mask': (ids % 9 < 6).long()}\n"
    )
    session = start("any", candidate=f"{file}:mean", inputs=f"{file}:inputs", device="cpu")
    session.judge()
    (row,) = (r for r in session.controls() if "sequences" in r.candidate)
    assert session.report.passed and row.caught and row.layout == "right_padded", session.report.markdown()


def test_the_dtype_is_that_of_the_parameters_where_the_inputs_are_ids():
    assert {r.dtype for r in audit(torch.nn.Embedding(50, 8).bfloat16(), IDS).rows} == {"bf16"}
