"""Megatron-LM's own core attention (megatron.core's DotProductAttention), where the package is installed; CUDA only.

It wants a process group: one of a single process is made at the first call. Tensors are [seq, batch, heads, dim] there.
"""

from functools import cache

import torch

DTYPE_FLAGS = {"float16": {"fp16": True}, "bfloat16": {"bf16": True}, "float32": {}}


@cache
def world():
    from megatron.core import parallel_state, tensor_parallel

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


@cache
def layer(heads, heads_kv, head_dim, causal, dropout_p, dtype):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_query_groups=heads_kv,
        kv_channels=head_dim,
        attention_dropout=dropout_p,
        masked_softmax_fusion=dtype != "float32",
        apply_query_key_layer_scaling=False,
        attention_softmax_in_fp32=True,
        **DTYPE_FLAGS[dtype],
    )
    kind = AttnMaskType.causal if causal else AttnMaskType.no_mask
    return DotProductAttention(config, layer_number=1, attn_mask_type=kind, attention_type="self")


def attention(q, k, v, case):
    world()
    run = layer(case.heads, case.kv, case.head_dim, case.causal, case.dropout_p, case.dtype)
    mask = None
    if case.causal:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)[None, None]
    out = run(*(t.transpose(0, 1).contiguous() for t in (q, k, v)), mask)
    return out.view(q.shape[1], q.shape[0], q.shape[2], -1).transpose(0, 1)
