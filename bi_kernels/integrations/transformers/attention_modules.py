"""The attention modules that `apply` puts in: RoPE and attention between linears that are swapped on their own."""

import sys

from torch import Tensor

import bi_kernels as bi
from bi_kernels.integrations.transformers.attention import attention, paged_attention
from bi_kernels.integrations.transformers.layout import current
from bi_kernels.integrations.transformers.swap import OPS, Swapped


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
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (linear(hidden_states).view(shape) for linear in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        table, positions = position_embeddings
        if isinstance(table, bi.RopeTable):
            q, k = bi.rope(q, table, positions), bi.rope(k, table, positions)
        else:  # cos and sin of a rotary module that was left
            rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
            q, k = rotate(q, k, table, positions, unsqueeze_dim=2)
        given = {"scale": self.scaling, "window": self.window}
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
