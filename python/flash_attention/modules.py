"""torch.nn modules over attention()."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_attention.arguments.head_dim import padded
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.names import Renamed
from flash_attention.functional import attention
from flash_attention.routes import route


class FlashAttention(torch.nn.Module):
    """Attention on (batch, heads, seq, head_dim) in O(seq) memory.

        flash_attn = FlashAttention()
        out = flash_attn(q, k, v, causal=True)

    Options given here (those of attention()) hold for every call; options given to a call add to them. dropout_p acts only
    in training mode. StandardAttention() accepts the same calls and computes the same results by the textbook algorithm.
    """

    kernel = None

    def __init__(self, **options: Any) -> None:
        super().__init__()
        wrong = {name: value for name, value in options.items() if name not in attention.__kwdefaults__}
        if wrong:
            refuse_keywords(attention, wrong)
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool | None = None, **options: Any) -> Any:
        """q (batch, heads_q, seq_q, head_dim), k and v (batch, heads_kv, seq_kv, head_dim) -> out shaped as q."""
        if causal is None:
            causal = self.options.get("causal", False)
        if not options and not self.options:
            return route()(q, k, v, causal=causal, layout="bhsd", kernel=self.kernel)
        options = {"kernel": self.kernel, "layout": "bhsd", **self.options, **options, "causal": causal}
        if not self.training:
            options.pop("dropout_p", None)
        return attention(q, k, v, **options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class StandardAttention(FlashAttention):
    """The textbook algorithm, which stores every score: a baseline to compare FlashAttention() with.

    For example:

        out = StandardAttention()(q, k, v, causal=True)
    """

    kernel = "standard"


# MultiheadAttention's names for the arguments of attention().
_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "dropout_p": "dropout"}


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with the same arguments and state dict, whose attention runs in O(seq) memory.

        layer = MultiheadAttention(32, 4, batch_first=True)
        x = torch.randn(2, 10, 32)
        out, _ = layer(x, x, x, need_weights=False)

    Attention weights do not exist here. A call with need_weights=True (torch's default), bias_k, bias_v, add_zero_attn or
    a dtype other than float32, float16 and bfloat16 goes to torch's own forward, which computes them, slowly.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Shapes, masks and results as in torch.nn.MultiheadAttention; the weights are None unless need_weights."""
        special = need_weights or self.bias_k is not None or self.add_zero_attn or (self.training and self.dropout == 1)
        if special or query.is_nested or query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask: got None; is_causal is only a hint and needs the mask beside it")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        q, k, v = (tensor.unflatten(-1, (self.num_heads, self.head_dim)) for tensor in self._project(query, key, value))
        mask, bias = self._scores(key_padding_mask, None if is_causal else attn_mask, q.shape[0], k.shape[1])
        with Renamed(_NAMES):
            out = padded(
                q,
                k,
                v,
                mask=mask,
                bias=bias,
                causal=is_causal,
                alignment="top_left",
                dropout_p=self.dropout if self.training else 0.0,
            )
        out = self.out_proj(out.flatten(-2))
        if not batched:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, None

    def _project(self, query, key, value):
        if self._qkv_same_embed_dim:
            if query is key and key is value:
                return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(*arguments) for arguments in zip((query, key, value), weights, biases, strict=True))

    def _scores(self, key_padding_mask, attn_mask, batch, seq_kv):
        """torch's masks (True = hidden, float = added) as (mask, bias) over [batch, heads, seq_q, seq_kv]."""
        mask = bias = None
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (batch, self.num_heads))
        if key_padding_mask is not None:
            if key_padding_mask.shape != (batch, seq_kv):
                raise ValueError(f"key_padding_mask: got shape {list(key_padding_mask.shape)}; expected {[batch, seq_kv]}")
            key_padding_mask = key_padding_mask[:, None, None, :]
        for hidden in (attn_mask, key_padding_mask):
            if hidden is None:
                continue
            if hidden.dtype == torch.bool:
                mask = ~hidden if mask is None else mask & ~hidden
            else:
                bias = hidden if bias is None else bias + hidden
        return mask, bias
