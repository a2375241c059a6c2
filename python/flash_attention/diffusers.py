"""Hugging Face diffusers: model.set_attn_processor(AttnProcessor()).

Other processors of diffusers (Flux, SD3, ...) call torch's scaled_dot_product_attention. After flash_attention.register()
that function uses this library whenever it could use its flash kernels.
"""

from typing import Any

import torch
from torch import Tensor

from flash_attention.arguments.head_dim import padded


class AttnProcessor:
    """For diffusers' Attention layers, self and cross; the results are those of its own AttnProcessor.

        unet.set_attn_processor(AttnProcessor())

    kernel: a name of kernels() instead of the planner's choice.
    """

    def __init__(self, kernel: str | None = None) -> None:
        self.kernel = kernel

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        x = hidden_states if attn.spatial_norm is None else attn.spatial_norm(hidden_states, temb)
        shape = x.shape
        if len(shape) == 4:  # pixels of a picture: [batch, channels, height, width]
            x = x.flatten(2).transpose(1, 2)
        context, bias = encoder_hidden_states, None
        if attention_mask is not None:
            keys = x.shape[1] if context is None else context.shape[1]
            bias = attn.prepare_attention_mask(attention_mask, keys, x.shape[0])
            bias = bias.unflatten(0, (x.shape[0], attn.heads))  # [batch, heads, queries or 1, keys]
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        if context is None:
            context = x
        elif attn.norm_cross:
            context = attn.norm_encoder_hidden_states(context)
        q, k, v = (
            layer(of).unflatten(-1, (-1, attn.to_q.out_features // attn.heads))
            for layer, of in ((attn.to_q, x), (attn.to_k, context), (attn.to_v, context))
        )
        if attn.norm_q is not None:
            q = attn.norm_q(q)
        if attn.norm_k is not None:
            k = attn.norm_k(k)
        options = _mask_or_bias(bias, q.dtype)
        out = padded(q, k, v, scale=attn.scale, kernel=self.kernel, **options).flatten(2)
        for layer in attn.to_out:
            out = layer(out)
        if len(shape) == 4:
            out = out.transpose(1, 2).reshape(shape)
        if attn.residual_connection:
            out = out + hidden_states
        return out / attn.rescale_output_factor


def _mask_or_bias(bias, dtype):
    if bias is None:
        return {}
    return {"mask": bias} if bias.dtype == torch.bool else {"bias": bias.to(dtype)}
