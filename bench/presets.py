"""Named lists of cases: what a stage of record.py, or --preset, measures."""

from cases import DTYPES, Case

MASKS = (False, True)
SWEEP = (512, 1024, 2048, 4096, 8192, 16384)


def paper(dtype="bfloat16"):
    """16384 tokens, 2048 wide: the shapes of the FlashAttention papers."""
    return [Case(16384 // s, s, 2048 // d, d, causal=c, dtype=dtype) for d in (64, 128, 256) for c in MASKS for s in SWEEP]


def gpt3(dtype="bfloat16"):
    """Attention of GPT-3's sizes at its length, 2048: 125M, 1.3B, 6.7B, 175B."""
    sizes = ((12, 64, 8), (24, 128, 8), (32, 128, 8), (96, 128, 4))
    return [Case(batch, 2048, heads, dim, causal=True, dtype=dtype) for heads, dim, batch in sizes]


def seq_sweep(dtype="bfloat16"):
    """L 512 to 16384 with batch * L = 16384, 16 heads of 128."""
    return [Case(16384 // s, s, 16, 128, causal=c, dtype=dtype) for c in MASKS for s in SWEEP]


def gqa(dtype="bfloat16"):
    """Grouped and multi-query heads, as in today's language models: 32 and 64 heads of 128."""
    groups = ((32, 8), (32, 4), (64, 8), (32, 1))
    return [
        Case(16384 // s, s, heads, 128, heads_kv=kv, causal=c, dtype=dtype)
        for heads, kv in groups for c in MASKS for s in (2048, 8192)
    ]  # fmt: skip


def options(dtype="bfloat16"):
    """What changes a score, at L 8192 and 2048 wide, head_dim 64, 128, 256; the first two are plain, to compare with."""
    kinds = (
        {},
        {"causal": True},
        {"causal": True, "softcap": 30.0},
        {"causal": True, "alibi": True},
        {"alibi": True},
        {"bias": "fixed"},
        {"bias": "learned"},
        {"causal": True, "dropout_p": 0.1},
        {"causal": True, "window": 1024},
        {"masked": "random"},
    )
    return [Case(2, 8192, 2048 // d, d, dtype=dtype, **kind) for d in (128, 64, 256) for kind in kinds]


def small(dtype="bfloat16"):
    """Twenty problems that do not fill a GPU: CLIP's 77 tokens, images of 197 and 577, one sequence of 512 to 2048."""
    shapes = (
        *((16, 77, 16, 64, False), (64, 77, 12, 64, True), (1, 77, 12, 64, True), (1, 197, 12, 64, False)),
        *((8, 197, 12, 64, False), (64, 197, 12, 64, False), (1, 577, 16, 64, False), (8, 577, 16, 64, False)),
        *((32, 577, 16, 64, False), (4, 128, 32, 128, False), (4, 128, 32, 128, True), (1, 512, 12, 64, True)),
        *((1, 512, 8, 128, False), (1, 1024, 8, 64, True), (1, 1024, 12, 64, False), (1, 1024, 16, 128, True)),
        *((8, 1024, 12, 64, True), (1, 2048, 8, 128, False), (1, 2048, 16, 64, True), (1, 2048, 16, 128, True)),
    )
    return [Case(*shape, causal=causal, dtype=dtype) for *shape, causal in shapes]


def cross(dtype="bfloat16"):
    """Fewer queries than keys: 256 on 8192 and 1024 on 16384, 16 heads and grouped ones."""
    sizes, heads = ((2, 256, 8192), (1, 1024, 16384)), ((16, 64, 16), (16, 128, 16), (32, 128, 8))
    return [
        Case(batch, keys, h, d, heads_kv=kv, queries=queries, dtype=dtype)
        for h, d, kv in heads for batch, queries, keys in sizes
    ]  # fmt: skip


def wide(dtype="bfloat16"):
    """Heads wider than 256, and 192 with values of 128."""
    found = [Case(1, s, 4, 512, causal=c, dtype=dtype) for c in MASKS for s in (4096, 16384)]
    return found + [Case(2, 8192, 16, 192, head_dim_v=128, causal=c, dtype=dtype) for c in MASKS]


def fp8(dtype="bfloat16"):
    """16 heads of 128, L 2048 to 16384: for `ours_fp8`, which takes them in 8 bits, and the others in 16."""
    return [Case(16384 // s, s, 16, 128, causal=c, dtype=dtype) for c in MASKS for s in SWEEP[2:]]


def fp32(dtype="float32"):
    """8192 tokens, 1024 wide, in full precision."""
    return [Case(8192 // s, s, 1024 // d, d, causal=c, dtype=dtype) for d in (64, 128) for c in MASKS for s in (1024, 4096)]


def packed(dtype="bfloat16"):
    """Sequences of very different lengths in one batch."""
    mixes = ((4096, 2048, 1024, 512, 512, 256, 128, 64), (2048,) * 4 + (128,) * 64, (16000, 384))
    return [Case(len(m), max(m), 16, 128, causal=c, dtype=dtype, lengths=m) for c in MASKS for m in mixes]


def cpu(dtype=None):
    """Small enough for a CPU: batch 1, 8 heads of 64 and 128, L 128 to 4096, every type."""
    lengths = (128, 256, 512, 1024, 2048, 4096)
    types = (dtype,) if dtype else DTYPES
    return [Case(1, s, 8, d, causal=c, dtype=t) for t in types for d in (64, 128) for c in MASKS for s in lengths]


def cpu_options(dtype=None):
    """For a CPU: decoding with grouped heads, a sliding window, a boolean mask; every type."""
    found = []
    for t in (dtype,) if dtype else DTYPES:
        for d in (64, 128):
            found += [Case(1, s, 8, d, heads_kv=kv, dtype=t, queries=1) for s in (4096, 32768) for kv in (2, 1)]
            found += [Case(1, s, 8, d, causal=True, dtype=t, window=256) for s in (1024, 4096)]
            found += [Case(1, s, 8, d, dtype=t, masked=m) for m in ("documents", "random") for s in (512, 2048)]
    return found


def cpu_lengths(dtype=None):
    """For a CPU: lengths of all kinds, even and odd, 160 to 3000; 8 heads of 64 and 128, every type."""
    lengths = (160, 211, 384, 997, 1000, 2048, 3000)
    types = (dtype,) if dtype else DTYPES
    return [Case(1, s, 8, d, causal=c, dtype=t) for t in types for d in (64, 128) for c in MASKS for s in lengths]


def quick(dtype=None):
    """Under a minute on anything."""
    return [Case(1, s, 4, 64, causal=c, dtype=dtype or "float32") for c in MASKS for s in (256, 512, 1024)]


SWEEPS = (paper, gpt3, seq_sweep, gqa, packed, cpu, cpu_options, cpu_lengths, quick)
# Cases of all kinds: the report has a table of them, and no chart by length.
LISTS = (options, small, cross, wide, fp8, fp32)
PRESETS = {f.__name__: f for f in (*SWEEPS, *LISTS)}


def preset(name, dtype=None):
    if name not in PRESETS:
        raise ValueError(f"preset: got '{name}'; allowed: {', '.join(PRESETS)}")
    return PRESETS[name](dtype) if dtype else PRESETS[name]()
