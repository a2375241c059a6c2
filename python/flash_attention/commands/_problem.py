"""The flags that describe one problem, shared by the verbs that need one."""


def add_arguments(parser):
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=1024, help="queries, and keys unless --seq-kv is given")
    parser.add_argument("--seq-kv", type=int, help="keys; default: --seq")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-kv", type=int, help="default: --heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true", help="the backward pass too")
    parser.add_argument("--device", help="a torch device; default: cuda where there is one, else cpu")


def tensors(arguments):
    """q, k, v [batch, heads, seq, head_dim], random normal."""
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: got {device}, but torch sees no NVIDIA GPU here; allowed: cpu")

    def tensor(heads, seq):
        return torch.randn(arguments.batch, heads, seq, arguments.head_dim, device=device).to(
            getattr(torch, arguments.dtype)
        )

    heads_kv, seq_kv = arguments.heads_kv or arguments.heads, arguments.seq_kv or arguments.seq
    return tensor(arguments.heads, arguments.seq), tensor(heads_kv, seq_kv), tensor(heads_kv, seq_kv)
