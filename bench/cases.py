"""What is measured: one Case is one attention problem; presets.py has named lists of them."""

from dataclasses import asdict, dataclass, replace

DTYPES = ("float32", "float16", "bfloat16")
BIASES = ("", "fixed", "learned")


def job(baseline):
    """What a baseline does besides attention in the type of its case. Only those of one job are compared."""
    return next((word for word in ("fp8", "tf32") if baseline.endswith("_" + word)), "")


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
    softcap: float = 0.0
    alibi: bool = False
    bias: str = ""  # [1, heads, queries, keys]; "learned": backward gives its gradient, too; "fixed": it does not
    head_dim_v: int = 0  # 0: as head_dim

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
        if self.bias not in BIASES:
            raise ValueError(f"bias: got '{self.bias}'; allowed: fixed, learned or none")

    @property
    def kv(self):
        return self.heads_kv or self.heads

    @property
    def dim_v(self):
        return self.head_dim_v or self.head_dim

    @property
    def plain(self):
        """Full or causal, and nothing else."""
        options = self.window, self.dropout_p, self.lengths, self.queries, self.masked, self.softcap, self.alibi, self.bias
        return not any(options) and self.dim_v == self.head_dim

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
        """4 * heads * pairs * head_dim for the forward pass, 2.5 times that for the backward pass: two products and five,
        of which one and three are as wide as the keys."""
        forward, backward = self.head_dim + self.dim_v, 3 * self.head_dim + 2 * self.dim_v
        width = {"forward": forward, "backward": backward, "both": forward + backward}[which]
        return 2 * self.heads * self.pairs() * width

    def bytes(self, which):
        """What must cross the memory bus at least: every tensor of the pass once."""
        q, kv = (self.batch * self.queries or self.tokens) * self.heads, self.tokens * self.kv
        each = (q + kv) * self.head_dim + (q + kv) * self.dim_v  # q k, v out; as much again: dq dk, dv dout
        biases = self.heads * (self.queries or self.seq) * self.seq if self.bias else 0
        forward, backward = each + biases, 2 * each + biases * (2 if self.bias == "learned" else 1)
        return {"forward": forward, "backward": backward, "both": forward + backward}[which] * self.element_bytes

    def label(self):
        length = f"{self.queries}x{self.seq}" if self.queries else f"{self.seq}"
        parts = [f"B{self.batch} L{length} H{self.heads}" + (f"/{self.kv}" if self.kv != self.heads else "")]
        dims = f"{self.head_dim}" + (f"/{self.dim_v}" if self.dim_v != self.head_dim else "")
        parts += [f"D{dims}", self.dtype, "causal" if self.causal else "full"]
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"dropout {self.dropout_p}"] if self.dropout_p else []
        parts += [f"{self.masked} mask"] if self.masked else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        parts += ["ALiBi"] if self.alibi else []
        parts += [f"{self.bias} bias"] if self.bias else []
        return " ".join(parts + (["packed"] if self.lengths else []))

    def as_json(self):
        return {**asdict(self), "heads_kv": self.kv, "lengths": list(self.lengths)}

    @classmethod
    def from_json(cls, case):
        """Also of files that were written before there was an option."""
        return cls(**{**case, "lengths": tuple(case["lengths"])})


def product(axes):
    """Every combination of the values given on the command line: {"seq": [1024, 2048], "causal": [True], ...}."""
    cases = [Case(batch=1, seq=1024, heads=8, head_dim=64)]
    for name, values in axes.items():
        cases = [replace(case, **{name: value}) for case in cases for value in values]
    return cases
