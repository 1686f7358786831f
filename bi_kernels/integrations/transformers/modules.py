"""The modules that `apply` puts in: subclasses of the classes that they replace, with our ops in forward.

`apply` changes a module's `__class__`, so its parameters, buffers, hooks and names stay. Dtypes follow autocast as
torch's own ops do.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from inspect import BoundArguments

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import bi_kernels as bi
from bi_kernels.checks import can_wait
from bi_kernels.integrations.transformers.attention import CHUNK, NAME, PAGED, attention, paged_attention
from bi_kernels.integrations.transformers.data_parallel import adopt, check_reached, own
from bi_kernels.integrations.transformers.experts import experts_forward
from bi_kernels.integrations.transformers.gradients import Folds, tensors
from bi_kernels.integrations.transformers.layout import Call, arguments, current, names_arguments, put, read
from bi_kernels.integrations.transformers.routing import ROUTED, ModelMode, Routed, routed
from bi_kernels.integrations.transformers.scoring import causal_lm_loss
from bi_kernels.integrations.transformers.swap import FOLDED, OPS, WITHIN, Swapped, check_parts
from bi_kernels.tokens import TokenLayout, current_layout


def _ops(module: nn.Module):
    return module.__dict__.get(OPS, bi)


def _folds() -> tuple[Folds, bool]:
    """Returns (the folds of the model's call, False), or (new ones, True) for a module that is called alone."""
    call = current()
    return (Folds(), True) if call is None else (call.folds, False)


LAYOUT = "bi_kernels_layout"  # of what a call returned: that of its tokens


def _rows(module: nn.Module, x: Tensor, lead: torch.Size) -> TokenLayout | nullcontext:
    """Returns the layout of a module's input of so many tokens. Raises ValueError for one that trains outside its
    model's call, where nobody told the sequences."""
    call = current()
    if call is not None:
        return call.rows(lead)
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters(recurse=False))
    if not trains or WITHIN not in module.__dict__ or current_layout("apply") is not None:
        return nullcontext()
    layout = getattr(x, LAYOUT, None)
    if layout is None or layout.rows != lead.numel():
        raise ValueError(
            f"apply: a {type(module).__name__} that trains is called outside its model's call, on {lead.numel()} "
            f"tokens, shape {tuple(lead)}, whose sequences nobody told; expected what the model's call returned, as it "
            "is, or `with bi.TokenLayout`"
        )
    return layout


def _ended(out: Tensor, folds: Folds, alone: bool) -> Tensor:
    if alone:
        folds.attach(out)
    return out


def _unrouted(forward: Callable) -> Callable:
    """Returns a forward made of our ops, which no mode around it has to see."""

    @functools.wraps(forward)
    def alone(*args, **kwargs):
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)

    return alone


POSITIONS = 2**22  # of a rope table, at most
NORM = "bi_kernels_norm"  # of a module: what it computes


class Linear(Swapped):
    """linear"""

    @_unrouted
    def forward(self, x: Tensor) -> Tensor:
        device, dtype = x.device.type, self.weight.dtype
        if not (torch.is_grad_enabled() or torch.is_autocast_enabled(device)):
            return _ops(self).linear(x, self.weight, self.bias)
        folds, alone = _folds()
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x = x.to(dtype)
        weight, bias = folds.cast(self.weight, dtype), folds.cast(self.bias, dtype)
        with _rows(self, x, x.shape[:-1]):
            return _ended(_ops(self).linear(x, weight, bias), folds, alone)


class Embedding(Swapped):
    """embedding"""

    @_unrouted
    def forward(self, ids: Tensor) -> Tensor:
        folds, alone = _folds()
        folds.use(self.weight, embedding=True)
        call = current()  # without one, a table's rows are added in the order of the ids, wherever padding stands
        with nullcontext() if call is None else call.rows(ids.shape):
            return _ended(_ops(self).embedding(ids, self.weight, self.padding_idx), folds, alone)


def _is_turned(x: Tensor) -> bool:
    """Tells whether x is (batch, heads, length, D), where the op wants (batch, length, heads, D)."""
    if x.dim() != 4 or 1 in x.shape[1:3]:
        return x.dim() == 4 and x.shape[1] != 1 and _rows_of(x.shape[:2]) is False
    return x.stride(1) < x.stride(2) or _rows_of(x.shape[:2]) is False and _rows_of((x.shape[0], x.shape[2])) is True


def _rows_of(lead: Sequence[int]) -> bool | None:
    """Tells whether leading dimensions are the tokens of the call; None if nobody knows these."""
    call = current()
    return None if call is None else lead[0] * lead[1] == call.batch * call.length


def _normed(norm: Callable, x: Tensor) -> Tensor:
    """Applies a norm to x, tokens first."""
    if not _is_turned(x):
        return norm(x)
    return norm(x.transpose(1, 2)).transpose(1, 2)


class Norm(Swapped):
    """rms_norm, qk_norm or layer_norm, as its code computes"""

    @_unrouted
    def forward(self, given: Tensor) -> Tensor:
        (folds, alone), norm_of, x = _folds(), self.__dict__[NORM], given
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weight, bias = folds.cast(self.weight, dtype), folds.cast(self._parameters.get("bias"), dtype)

        def norm(x: Tensor) -> Tensor:
            with _rows(self, given, x.shape[:-2] if x.dim() == 4 else x.shape[:-1]):
                return norm_of(_ops(self), x if norm_of.follows_x else x.to(dtype), weight, bias)

        return _ended(_normed(norm, x), folds, alone)


class Experts(Swapped):
    """grouped_linear, and a combination in the experts' order"""

    @_unrouted
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class MLP(Swapped):
    """swiglu between its linears"""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(bi.swiglu(self.gate_proj(x), self.up_proj(x)))


class Attention(Swapped):
    """rope and attention between its linears"""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple,
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        call, dropout = current(), self.attention_dropout if self.training else 0.0
        if call is None:
            raise ValueError(f"{type(self).__name__}: called outside its model, expected a call of the model itself")
        if dropout:
            raise ValueError(f"{type(self).__name__}: attention_dropout is {dropout}, expected 0 where it trains")
        if kwargs.get("output_attentions"):
            raise ValueError(f"{type(self).__name__}: output_attentions is True, expected False: no weights are held")
        call.attended += 1
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (linear(hidden_states).view(shape) for linear in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        table, positions = position_embeddings
        if isinstance(table, _Table):
            table = table.rope
            q, k = bi.rope(q, table, positions), bi.rope(k, table, positions)
        else:  # cos and sin of a rotary module that was left
            rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
            q, k = rotate(q, k, table, positions, unsqueeze_dim=2)
        given = {"scale": self.scaling, "window": self.window, "chunk": getattr(attention_mask, CHUNK, None)}
        keys = self.__dict__.get(OPS)  # where ranks share the weights
        if call.paged is not None and keys is not None:
            raise ValueError(
                f"{type(self).__name__}: continuous batching with ranks that share weights, expected generate"
            )
        if call.paged is not None:
            out = paged_attention(self, q, k, v, call, **given, **kwargs)
        else:
            attend = lambda *qkv: attention(self, *qkv, call, cache=past_key_values, **given)
            out = attend(q, k, v) if keys is None else keys.attend(q, k, v, lambda *qkv: (attend(*qkv), None))[0]
        return self.o_proj(out.flatten(-2)), None

    @property
    def window(self) -> int | None:
        """Returns how many keys a query sees, None for all."""
        return getattr(self, "sliding_window", None)


class MistralAttention(Attention):
    """rope and attention between its linears"""

    @property
    def window(self) -> int | None:
        """Returns the model's window: its layers have none of their own."""
        return getattr(self.config, "sliding_window", None)


def _last(positions: Tensor) -> int:
    """Returns the largest of positions; 0 where nobody can wait for it. Raises ValueError for one that no table has."""
    if not positions.numel() or not can_wait(positions):
        return 0
    first, last = torch.stack(positions.aminmax()).tolist()
    if first < 0 or last >= POSITIONS:
        raise ValueError(
            f"apply: position_ids holds {first if first < 0 else last}, expected 0 to {POSITIONS - 1}, padding's too"
        )
    return last


class _Table:
    """Holds a rope table; what casts a module's arguments, as FSDP2 does, looks for tensors and finds none."""

    def __init__(self, rope: bi.RopeTable):
        self.rope = rope


class Rotary(Swapped):
    """a rope table, computed in fp64"""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[_Table, Tensor]:
        call = current()
        past = call.past if call is not None and isinstance(call.past, int) else 0
        room = call.paged["room"] if call is not None and call.paged is not None else 0  # its warm-up goes to the end
        longest = max(self.config.max_position_embeddings, past + position_ids.shape[-1], room, _last(position_ids) + 1)
        table = self.__dict__.get("bi_kernels_table")
        if table is None or table.cos.device != x.device or len(table.cos) < longest:
            position = torch.arange(longest, dtype=torch.float64, device="cpu")[:, None]
            angle, scale = position * self.frequencies().double(), float(self.attention_scaling)
            table = bi.RopeTable(*((f * scale).float().to(x.device) for f in (angle.cos(), angle.sin())))
            self.__dict__["bi_kernels_table"] = table
        return _Table(table), position_ids.expand(x.shape[:2]).contiguous()

    def frequencies(self) -> Tensor:
        """Returns the module's frequencies, or the CPU's in fp32 where the module's differ only by a cast of the model
        or in the last bits."""
        given = self.inv_freq.detach().cpu()
        make = self.compute_default_rope_parameters
        with torch.device("cpu"):
            exact = (make if self.rope_type == "default" else ROPE_INIT_FUNCTIONS[self.rope_type])(self.config)[0].cpu()
        rounded = exact.to(given.dtype).float()
        same = (rounded - given.float()).abs() <= 2.0**-20 * rounded.abs()
        return exact if bool(same.all()) else given


class Checkpointed(Swapped):
    """what checkpointing computes again knows the call's sequences"""

    @property
    def _gradient_checkpointing_func(self) -> Callable:
        stored, call = self.__dict__["_gradient_checkpointing_func"], current()
        return stored if call is None else lambda function, *given: stored(call.within(function), *given)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function: Callable) -> None:
        self.__dict__["_gradient_checkpointing_func"] = function


def _attention_of(implementation: object) -> str:
    return str(implementation).removeprefix("paged|")


def _model_forward(replaces: type[nn.Module]) -> Callable:
    plain = replaces.forward
    with_mode = routed(plain)

    @functools.wraps(plain)
    def forward_of_a_call(self, *args, **kwargs):
        forward, call = with_mode if self.__dict__.get(ROUTED) else plain, current()
        if not isinstance(self, Model):
            return forward(self, *args, **kwargs)
        if replaces.forward is not plain:  # patched on the class since
            patch = _patch(replaces.forward)
            return (
                _in_a_call(self, patch, args, kwargs, is_patched=True) if call is None else patch(self, *args, **kwargs)
            )
        if call is None:
            return _in_a_call(self, forward, args, kwargs)
        if not call.is_patched:
            return forward(self, *args, **kwargs)
        bound, given = arguments(self.naming, self, *args, **kwargs)
        _put_positions(self, call, bound, given)
        with call.known():
            return forward(*bound.args, **bound.kwargs)

    return forward_of_a_call


def _put_positions(model: nn.Module, call: Call, bound: BoundArguments, given: dict) -> None:
    """Gives a model the positions of a call's tokens in their sequences, where padding or packing shifts them."""
    x = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if model.whole and given.get("position_ids") is None and x is not None and x.shape[:2] == (call.batch, call.length):
        positions = call.positions()
        if positions is not None:
            put(bound, "position_ids", positions)


def _in_a_call(self: nn.Module, forward: Callable, args: tuple, kwargs: dict, is_patched: bool = False) -> object:
    """Runs a model's forward in a call, whose sequences its arguments tell."""
    if not torch.compiler.is_compiling():
        check_parts("apply", self)
    if self.whole and (said := _attention_of(self.config._attn_implementation)) not in (NAME, PAGED):
        raise ValueError(
            f"apply: the model's attn_implementation is {said!r}, expected {NAME!r}: a model that shares its "
            "configuration was restored, or it was set; restore and apply again"
        )
    trains = torch.is_grad_enabled()
    if not (trains or self.whole):
        return forward(self, *args, **kwargs)
    ours = trains and not torch.compiler.is_compiling()
    sharded, ddp = adopt(self) if ours else ([], None)
    if is_patched and self.__dict__.get(FOLDED) and any(isinstance(m, FSDPModule) for m in self.modules()):
        raise ValueError(
            "apply: a forward was set on a model that fully_shard was given, expected the model's own: its hooks would "
            "run within that; put the code in a module around the model"
        )
    bound, given = arguments(self.naming, self, *args, **kwargs)
    call = read(**given)
    if not call.length:  # the model says so itself, or one within it finds them
        return forward(self, *args, **kwargs)
    call.folds.is_watched = ddp is not None and ddp.find_unused_parameters
    call.is_patched, call.is_promised = is_patched, bool(self.__dict__.get(FOLDED))
    if not is_patched:  # what was set on it hands on what it is given
        _put_positions(self, call, bound, given)
    keep = given.get("logits_to_keep", 0)
    keep = keep if trains and (isinstance(keep, Tensor) or keep) else None
    if keep is not None:  # the head's fold is over the call's tokens, so it is given them all
        put(bound, "logits_to_keep", 0)
        kwargs = {k: 0 if k == "logits_to_keep" else v for k, v in kwargs.items()}
    with call:
        out = forward(self, *args, **kwargs) if is_patched else forward(*bound.args, **bound.kwargs)
    if keep is not None:
        kept = slice(-keep, None) if isinstance(keep, int) else keep
        if isinstance(out, tuple):
            at = 0 if given.get("labels") is None else 1
            out = (*out[:at], out[at][:, kept], *out[at + 1 :])
        elif getattr(out, "logits", None) is not None:
            out.logits = out.logits[:, kept]
    if ours:
        whole, promised = own(sharded), self.__dict__.get(FOLDED, ())
        named = {n: whole.get(id(p), p) for n, p in self.named_parameters() if p.requires_grad and n in promised}
        call.folds.beside = {n: p for n, p in named.items() if id(p) not in call.folds.parameters}
    if ddp is not None:
        check_reached(ddp, call.folds.parameters.values(), tensors(out))
    call.folds.attach(out)
    if ours:
        for t in tensors(out):
            setattr(t, LAYOUT, call.layout)
    return out


def _patch(forward: Callable) -> Callable:
    """Returns a forward that was put in after `apply`, as trainers do, with what its code asks of PyTorch routed."""

    def patched(self, *args, **kwargs):
        call = current()
        with nullcontext() if call is None else ModelMode(call.folds):
            return forward(self, *args, **kwargs)

    return patched


class RoutedLayer(Routed, Checkpointed):
    """its functions, routed; what checkpointing computes again knows the call's sequences"""


class Model(Swapped):
    """finds the sequences of a call; puts folded gradients into .grad"""

    @classmethod
    def members(cls, replaces: type[nn.Module]) -> dict:
        """Returns a forward whose signature is that of the model."""
        return {"forward": _model_forward(replaces), "naming": staticmethod(names_arguments(replaces))}

    def __call__(self, *args, **kwargs):
        """Calls the model's forward, or one that was set on the instance since, which its own runs in."""
        if "forward" in self.__dict__ and current() is None and not torch.compiler.is_compiling():
            return _in_a_call(self, _patch(nn.Module.__call__), args, kwargs, is_patched=True)
        return super().__call__(*args, **kwargs)

    @property
    def loss_function(self) -> Callable:
        """Returns the loss over our logprobs in the place of Transformers' own; another one stays."""
        stock = super().loss_function
        return causal_lm_loss if stock is ForCausalLMLoss else stock

    @loss_function.setter
    def loss_function(self, value: Callable) -> None:
        self._loss_function = value


class LanguageModel(Model):
    """finds the sequences of a call; puts folded gradients into .grad"""

    whole = True

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs) -> None:
        """Raises ValueError for any other than that of `apply`."""
        if _attention_of(attn_implementation) not in (NAME, PAGED):
            raise ValueError(
                f"set_attn_implementation: attn_implementation is {attn_implementation!r}, expected {NAME!r} until "
                "restore(model)"
            )
        self.config._attn_implementation_internal = attn_implementation

    def init_continuous_batching(self, *args, **kwargs):
        """Returns the manager of continuous batching, told not to make dense masks."""
        self.set_attn_implementation(PAGED)
        return super().init_continuous_batching(*args, **kwargs)

    def _valid_auto_compile_criteria(self, *args, **kwargs) -> bool:
        """Returns False: `generate` with a static cache is not compiled; capture a CUDA graph instead."""
        return False
