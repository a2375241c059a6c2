"""The flags that describe one problem, shared by the verbs that need one."""

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def add_arguments(parser):
    """The names of `flash-attention bench`."""
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, help="default: --heads")
    parser.add_argument("--seq-q", type=int, default=1024, help="queries")
    parser.add_argument("--seq-kv", type=int, help="keys; default: --seq-q")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=(*DTYPES, *DTYPES.values()), default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true", help="the backward pass too")
    parser.add_argument("--device", help="a torch device; default: cuda if there is one, else cpu")


def tensors(arguments):
    """q, k, v [batch, heads, seq, head_dim], random normal."""
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: got {device}, but torch sees no NVIDIA GPU here; allowed: cpu")

    def tensor(heads, seq):
        return torch.randn(arguments.batch, heads, seq, arguments.head_dim, device=device).to(
            getattr(torch, DTYPES.get(arguments.dtype, arguments.dtype))
        )

    heads_kv, seq_kv = arguments.kv_heads or arguments.heads, arguments.seq_kv or arguments.seq_q
    return tensor(arguments.heads, arguments.seq_q), tensor(heads_kv, seq_kv), tensor(heads_kv, seq_kv)
