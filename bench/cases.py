"""What is measured: one Case is one attention problem; a preset is a named list of them."""

from dataclasses import asdict, dataclass, replace

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Case:
    batch: int
    seq: int
    heads: int
    head_dim: int
    heads_kv: int = 0  # 0: as many as heads
    causal: bool = False
    dtype: str = "bfloat16"
    window: int = 0  # keys a query sees to its left, itself not counted; 0: all
    dropout_p: float = 0.0
    lengths: tuple[int, ...] = ()  # packed: one length per sequence, of which seq is the longest
    queries: int = 0  # decoding: queries at the end of seq keys; 0: as many as keys
    masked: str = ""  # a boolean mask: "documents" (four in a sequence, each sees itself) or "random" (half of all keys)

    def __post_init__(self):
        for name in ("batch", "seq", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: 1 or more")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got '{self.dtype}'; allowed: {', '.join(DTYPES)}")
        if self.heads % self.kv:
            raise ValueError(f"heads_kv: got {self.heads_kv}; allowed: a divisor of heads, {self.heads}")
        if not 0 <= self.dropout_p < 1:
            raise ValueError(f"dropout_p: got {self.dropout_p}; allowed: from 0 to below 1")

    @property
    def kv(self):
        return self.heads_kv or self.heads

    @property
    def element_bytes(self):
        return 4 if self.dtype == "float32" else 2

    @property
    def tokens(self):
        return sum(self.lengths) if self.lengths else self.batch * self.seq

    def pairs(self):
        """Query-key pairs of all sequences: length^2, halved for causal; counted where there is a window."""
        if self.queries:
            return self.batch * self.queries * self.seq
        total = 0
        for length in self.lengths or (self.seq,) * self.batch:
            if self.window:
                left = min(self.window, length - 1)
                seen = (left + 1) * length - left * (left + 1) // 2
                total += seen if self.causal else 2 * seen - length
            else:
                total += length * length / 2 if self.causal else length * length
        return total

    def flops(self, which):
        """4 * heads * pairs * head_dim for the forward pass, 2.5 times that for the backward pass."""
        return 4 * self.heads * self.pairs() * self.head_dim * {"forward": 1.0, "backward": 2.5, "both": 3.5}[which]

    def bytes(self, which):
        """What must cross the memory bus at least: every tensor of the pass once."""
        q, kv = (self.batch * self.queries or self.tokens) * self.heads, self.tokens * self.kv
        forward = 2 * q + 2 * kv
        backward = 4 * q + 4 * kv  # q k v out dout, dq dk dv
        elements = {"forward": forward, "backward": backward, "both": forward + backward}[which]
        return elements * self.head_dim * self.element_bytes

    def label(self):
        length = f"{self.queries}x{self.seq}" if self.queries else f"{self.seq}"
        parts = [f"B{self.batch} L{length} H{self.heads}" + (f"/{self.kv}" if self.kv != self.heads else "")]
        parts += [f"D{self.head_dim}", self.dtype, "causal" if self.causal else "full"]
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"dropout {self.dropout_p}"] if self.dropout_p else []
        parts += [f"{self.masked} mask"] if self.masked else []
        return " ".join(parts + (["packed"] if self.lengths else []))

    def as_json(self):
        return {**asdict(self), "heads_kv": self.kv, "lengths": list(self.lengths)}


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
    """Grouped and multi-query heads, as in today's language models: 32 heads of 128."""
    return [Case(16384 // s, s, 32, 128, heads_kv=kv, causal=True, dtype=dtype) for kv in (32, 8, 1) for s in (2048, 8192)]


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


def quick(dtype=None):
    """Under a minute on anything."""
    return [Case(1, s, 4, 64, causal=c, dtype=dtype or "float32") for c in MASKS for s in (256, 512, 1024)]


PRESETS = {f.__name__: f for f in (paper, gpt3, seq_sweep, gqa, packed, cpu, cpu_options, quick)}


def preset(name, dtype=None):
    if name not in PRESETS:
        raise ValueError(f"preset: got '{name}'; allowed: {', '.join(PRESETS)}")
    return PRESETS[name](dtype) if dtype else PRESETS[name]()


def product(axes):
    """Every combination of the values given on the command line: {"seq": [1024, 2048], "causal": [True], ...}."""
    cases = [Case(batch=1, seq=1024, heads=8, head_dim=64)]
    for name, values in axes.items():
        cases = [replace(case, **{name: value}) for case in cases for value in values]
    return cases
