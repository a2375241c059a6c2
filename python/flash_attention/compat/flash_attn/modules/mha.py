"""flash_attn.modules.mha: multi-head attention with its projections, by flash-attn's names of arguments and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_attention.compat.flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attention.compat.flash_attn.kv_cache import flash_attn_with_kvcache
from flash_attention.compat.flash_attn.layers.rotary import RotaryEmbedding

__all__ = ["MHA", "CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "SelfAttention", "get_alibi_slopes"]


def get_alibi_slopes(nheads: int) -> list[float]:
    """Slopes of ALiBi: powers of 2^(-8 / n), n the largest power of two up to nheads; further slopes are between those."""
    power = 1 << (nheads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]
    between = [2.0 ** (-4.0 * (2 * n + 1) / power) for n in range(nheads - power)]
    return slopes + between


class _Options(torch.nn.Module):
    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale, self.window_size = causal, softmax_scale, window_size
        self.drop, self.deterministic = torch.nn.Dropout(attention_dropout), deterministic
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def _options(self, causal):
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": self.alibi_slopes,
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_Options):
    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """qkv [batch, seq, 3, heads, head_dim], or [total, 3, heads, head_dim] with cu_seqlens."""
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self._options(causal))
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **self._options(causal))


class FlashCrossAttention(_Options):
    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """q [batch, seq_q, heads, head_dim], kv [batch, seq_k, 2, heads_k, head_dim]; without batch and seq if packed."""
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self._options(causal))
        lengths = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
        return flash_attn_varlen_kvpacked_func(q, kv, *lengths, **self._options(causal))


# In flash-attn these are the textbook algorithm. The results are the same, so there is one implementation here.
class SelfAttention(FlashSelfAttention):
    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        _refuse_padding(key_padding_mask)
        return super().forward(qkv, causal)


class CrossAttention(FlashCrossAttention):
    def forward(self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        _refuse_padding(key_padding_mask)
        return super().forward(q, kv, causal)


class MHA(torch.nn.Module):
    """Projections, rotary embedding and attention. Parameters: Wqkv, or Wq and Wkv with cross_attn, and out_proj.

        layer = MHA(64, 4, num_heads_kv=2, causal=True, rotary_emb_dim=16)
        out = layer(torch.randn(2, 10, 64))

    use_flash_attn and fused_bias_fc have no effect: the attention is always this library's. dwconv is refused.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dwconv:
            raise NotImplementedError("dwconv: got True; convolutions before attention are not supported")
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if embed_dim % num_heads or num_heads % num_heads_kv:
            got = f"embed_dim {embed_dim}, num_heads {num_heads}, num_heads_kv {num_heads_kv}"
            raise ValueError(f"num_heads: got {got}; each must be a multiple of the next")
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn, self.causal, self.layer_idx = cross_attn, causal, layer_idx
        self.softmax_scale, self.window_size = softmax_scale, window_size
        self.return_residual, self.checkpointing = return_residual, checkpointing
        self.rotary_emb_dim = rotary_emb_dim
        made = {"device": device, "dtype": dtype}
        slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
        if rotary_emb_dim > 0:
            if cross_attn:
                raise ValueError(f"rotary_emb_dim: got {rotary_emb_dim}; it must be 0 with cross_attn=True")
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                scale_base=rotary_emb_scale_base,
                interleaved=rotary_emb_interleaved,
                device=device,
            )
        kv_dim = 2 * self.head_dim * num_heads_kv
        if cross_attn:
            self.Wq = torch.nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **made)
            self.Wkv = torch.nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **made)
        else:
            self.Wqkv = torch.nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **made)
        options = {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        options |= {"window_size": window_size, "alibi_slopes": slopes}
        self.inner_attn = FlashSelfAttention(**options)
        self.inner_cross_attn = FlashCrossAttention(**options)
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **made)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """Keys and values of all rows to come, [batch, max_seqlen, 2, heads_kv, head_dim]."""
        weight = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(shape, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """x [batch, seq, embed_dim], or [total, embed_dim] with cu_seqlens; x_kv: for keys and values, with cross_attn.

        mixer_subset: the rows of x (after projection, those of queries) whose results are needed. inference_params:
        flash-attn's, or anything with max_batch_size, max_seqlen, seqlen_offset, batch_size_offset, lengths_per_sample and
        key_value_memory_dict: x is appended to the cache of layer_idx.
        """
        _refuse_padding(key_padding_mask)
        if inference_params is not None and (cu_seqlens is not None or mixer_subset is not None or self.cross_attn):
            raise NotImplementedError("inference_params: takes no cu_seqlens, mixer_subset or cross_attn")
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset]).unflatten(-1, (self.num_heads, self.head_dim))
            kv = self._kv(self.Wkv(x if x_kv is None else x_kv))
        else:
            qkv = self.Wqkv(x)
            width = self.num_heads * self.head_dim
            q, kv = qkv[..., :width].unflatten(-1, (self.num_heads, self.head_dim)), self._kv(qkv[..., width:])
            if self.rotary_emb_dim > 0:
                q, kv = self._rotated(q, kv, cu_seqlens, max_seqlen, inference_params)
            if mixer_subset is not None:
                q = q[:, mixer_subset]
        if inference_params is not None:
            context = self._over_cache(q, kv, inference_params)
        else:
            lengths = () if cu_seqlens is None else (cu_seqlens, max_seqlen, *self._of_keys(kwargs, cu_seqlens, max_seqlen))
            run = (self.inner_cross_attn, q, kv, None, *lengths)
            context = checkpoint(*run, use_reentrant=False) if self.checkpointing else run[0](*run[1:])
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _kv(self, projected):
        return projected.unflatten(-1, (2, self.num_heads_kv, self.head_dim))

    @staticmethod
    def _of_keys(given, cu_seqlens, max_seqlen):
        return given.get("cu_seqlens_k", cu_seqlens), given.get("max_seqlen_k", max_seqlen)

    def _rotated(self, q, kv, cu_seqlens, max_seqlen, inference_params):
        if cu_seqlens is not None:
            raise NotImplementedError("rotary_emb_dim: rotary embedding of packed sequences is not supported")
        offset = 0
        if inference_params is not None:
            lengths = inference_params.lengths_per_sample
            offset = inference_params.seqlen_offset if lengths is None else lengths
            max_seqlen = inference_params.max_seqlen
        return self.rotary_emb(q, kv, seqlen_offset=offset, max_seqlen=max_seqlen)

    def _over_cache(self, q, kv, params):
        """Appends keys and values to the cache, and attends to all of them."""
        if self.layer_idx is None:
            raise ValueError("layer_idx: got None; inference_params needs it")
        caches = params.key_value_memory_dict
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(params.max_batch_size, params.max_seqlen, kv.dtype)
        first = params.batch_size_offset
        cache = caches[self.layer_idx][first : first + q.shape[0]]
        held = params.seqlen_offset if params.lengths_per_sample is None else params.lengths_per_sample
        return flash_attn_with_kvcache(
            q, cache[:, :, 0], cache[:, :, 1], kv[:, :, 0], kv[:, :, 1], cache_seqlens=held,
            softmax_scale=self.softmax_scale, causal=self.causal, window_size=self.window_size,
            alibi_slopes=self.inner_cross_attn.alibi_slopes,
        )  # fmt: skip


def _refuse_padding(mask):
    if mask is not None:
        raise NotImplementedError(
            "key_padding_mask: got a tensor; take padding out with flash_attn.bert_padding.unpad_input, and give cu_seqlens"
        )
