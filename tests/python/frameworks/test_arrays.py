"""attention() on NumPy arrays."""

import flash_attention
import numpy
import pytest
import reference
import torch


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_numpy(layout):
    q, k, v = (torch.randn(2, 12, 4, 32) for _ in range(3))
    bias = torch.randn(4, 1, 1)
    expected, expected_lse = reference.attention(q.double(), k.double(), v.double(), causal=True, bias=bias)
    inputs = [tensor.transpose(1, 2) if layout == "bhsd" else tensor for tensor in (q, k, v)]
    out, lse = flash_attention.attention(
        *(tensor.numpy() for tensor in inputs), causal=True, bias=bias.numpy(), layout=layout, return_lse=True
    )
    assert isinstance(out, numpy.ndarray)
    assert lse.dtype == numpy.float32
    out = out.swapaxes(1, 2) if layout == "bhsd" else out
    numpy.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-4)
    numpy.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=1e-4)


def test_float16_and_read_only():
    q = numpy.random.default_rng(0).standard_normal((1, 9, 2, 16)).astype(numpy.float16)
    q.flags.writeable = False
    out = flash_attention.attention(q, q, q)
    expected, _ = reference.attention(*(torch.from_numpy(q.astype(numpy.float64)),) * 3)
    assert out.dtype == numpy.float16
    numpy.testing.assert_allclose(out, expected, atol=2e-3)


def test_packed_with_mask():
    q = numpy.random.default_rng(0).standard_normal((7, 2, 16)).astype(numpy.float32)
    starts = numpy.array([0, 3, 7], dtype=numpy.int32)
    mask = numpy.ones((2, 1, 4, 4), dtype=bool)
    mask[:, :, :, 0] = False
    out = flash_attention.attention_packed(q, q, q, starts, max_seqlen_q=4, max_seqlen_kv=4, mask=mask)
    tensor = torch.from_numpy(q).double()
    expected, _ = reference.attention_packed(tensor, tensor, tensor, [0, 3, 7], [0, 3, 7], mask=torch.from_numpy(mask))
    numpy.testing.assert_allclose(out, expected, atol=1e-5)


def test_dropout_seed():
    q = numpy.random.default_rng(0).standard_normal((1, 32, 2, 16)).astype(numpy.float32)
    first, again = (flash_attention.attention(q, q, q, dropout_p=0.5, seed=3) for _ in range(2))
    assert (first == again).all()
    assert (first != flash_attention.attention(q, q, q, dropout_p=0.5)).any()
