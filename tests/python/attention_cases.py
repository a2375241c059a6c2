"""One problem per option, small enough for a finite-difference check, and the run that compares one with the reference."""

from dataclasses import dataclass, field

import flash_attention
import reference
import torch
from comparison import assert_close, exact_and_plain, gradients


@dataclass
class Case:
    """Sizes, options as plain values, and the shapes of the tensors that options need."""

    name: str
    batch: int = 2
    seq_q: int = 33
    seq_kv: int = 47
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int | None = None
    options: dict = field(default_factory=dict)
    tensors: tuple = ()
    bias_shape: tuple | None = None

    def make(self, dtype, device):
        """q, k, v [batch, seq, heads, dim] and the options with their tensors."""
        shape = (self.batch, self.seq_q, self.heads, self.head_dim)
        q = torch.randn(shape)
        k = torch.randn(self.batch, self.seq_kv, self.heads_kv, self.head_dim)
        v = torch.randn(self.batch, self.seq_kv, self.heads_kv, self.head_dim_v or self.head_dim)
        options = dict(self.options)
        for name in self.tensors:
            options[name] = getattr(self, f"_{name}")().to(device)
        if self.bias_shape:
            options["bias"] = torch.randn(self.bias_shape).to(device, dtype)
        return *(tensor.to(device, dtype) for tensor in (q, k, v)), options

    def _mask(self):
        mask = torch.rand(self.batch, 1, self.seq_q, self.seq_kv) > 0.4
        mask[0, 0, 1] = False
        return mask

    def _alibi_slopes(self):
        return torch.rand(self.batch, self.heads)

    def _sink(self):
        return torch.randn(self.heads)

    def _key_lengths(self):
        return torch.tensor([self.seq_kv - 5, 3][: self.batch], dtype=torch.int32)

    def _seqused_q(self):
        return torch.tensor([self.seq_q, self.seq_q // 2][: self.batch], dtype=torch.int32)

    def _seqused_kv(self):
        return torch.tensor([self.seq_kv // 3, self.seq_kv][: self.batch], dtype=torch.int32)


CASES = [
    Case("plain"),
    Case("one_query", seq_q=1),
    Case("no_query", seq_q=0),
    Case("no_key", seq_kv=0),
    Case("long", seq_q=130, seq_kv=257, batch=1, head_dim=64),
    Case("multi_query", heads_kv=1),
    Case("narrow_v", head_dim=40, head_dim_v=24),
    Case("wide", head_dim=128, heads_kv=4),
    Case("causal", options={"causal": True}),
    Case("causal_empty_rows", seq_q=47, seq_kv=33, options={"causal": True}),
    Case("causal_top_left", options={"causal": True, "alignment": "top_left"}),
    Case("window", options={"window": (7, 3)}),
    Case("window_left", options={"window": (5, -1)}),
    Case("window_causal", options={"window": (9, None), "causal": True}),
    Case("scale_softcap", options={"scale": 0.3, "softcap": 5.0}),
    Case("alibi", tensors=("alibi_slopes",), options={"causal": True}),
    Case("bias", bias_shape=(2, 4, 33, 47)),
    Case("bias_heads", bias_shape=(1, 4, 33, 47)),
    Case("bias_rows", bias_shape=(2, 1, 1, 47)),
    Case("bias_plane", bias_shape=(33, 47)),
    Case("mask", tensors=("mask",)),
    Case("key_lengths", tensors=("key_lengths",), options={"causal": True}),
    Case("seqused", tensors=("seqused_q", "seqused_kv"), options={"causal": True}),
    Case("sink", tensors=("sink",), options={"causal": True}),
    Case("dropout", options={"dropout_p": 0.3, "seed": 1234567890123, "offset": 7}),
    Case("everything", tensors=("alibi_slopes", "mask", "sink"), bias_shape=(1, 4, 33, 47),
         options={"causal": True, "window": (20, 0), "softcap": 8.0, "dropout_p": 0.2, "seed": 5}),
]  # fmt: skip
NAMES = [case.name for case in CASES]


def check(case, dtype, device, layout="bshd", kernel=None, backward=True):
    """Compares out, lse and every gradient of one case with the reference."""
    q, k, v, options = case.make(dtype, device)
    learned = [name for name in ("bias", "sink") if name in options]
    inputs = [q, k, v, *(options.pop(name) for name in learned)]

    def ours(q, k, v, *more):
        if layout == "bhsd":
            q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
        named = dict(zip(learned, more, strict=True))
        out, lse = flash_attention.attention(q, k, v, layout=layout, kernel=kernel, return_lse=True, **options, **named)
        return (out.transpose(1, 2) if layout == "bhsd" else out), lse

    plain_options = {name: value for name, value in options.items() if name != "window"}
    if "window" in options:
        plain_options["window"] = tuple(-1 if side is None else side for side in options["window"])

    def plain(q, k, v, *more):
        return reference.attention(q, k, v, **plain_options, **dict(zip(learned, more, strict=True)))

    names = ["out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in learned)]
    if not backward:
        with torch.no_grad():
            results = [function(*inputs) for function in (ours, plain)]
            results.append(plain(*(tensor.double() for tensor in inputs)))
        for name, actual, same, exact in zip(names[:2], results[0], results[1], results[2], strict=True):
            assert_close(actual, exact, same.to(dtype if name == "out" else same.dtype), f"{case.name} {name}")
        return
    dout = torch.randn(*q.shape[:-1], v.shape[-1], device=device, dtype=torch.float64)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=device, dtype=torch.float64)
    actual = gradients(ours, inputs, dout, dlse)
    for name, *three in zip(names, actual, *exact_and_plain(plain, inputs, dout, dlse), strict=True):
        assert_close(*three, f"{case.name} {name}")
