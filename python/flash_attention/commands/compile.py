"""python -m flash_attention compile: kernels for a shape, compiled into the cache before they are needed."""

import flash_attention

help = "compile the kernels of one shape into the cache"


def add_arguments(parser):
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-kv", type=int, help="default: heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true", help="the backward kernels too")
    parser.add_argument("--device", default="cuda", help="a torch device, default cuda")


def run(arguments):
    import torch

    def tensor(heads):
        shape = (arguments.batch, arguments.seq, heads, arguments.head_dim)
        return torch.empty(shape, dtype=getattr(torch, arguments.dtype), device=arguments.device)

    q, k = tensor(arguments.heads), tensor(arguments.heads_kv or arguments.heads)
    flash_attention.compile(q, k, k, causal=arguments.causal, backward=arguments.backward)
    print(flash_attention.explain(q, k, k, causal=arguments.causal))
    return 0
