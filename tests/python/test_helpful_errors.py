"""A refusal names what makes the argument right, in the caller's library, whichever library came first."""

import numpy as np
import pytest
import torch
from flash_attention import attention

Q = torch.randn(2, 16, 2, 64)
A = Q.numpy()


@pytest.mark.parametrize("name", ["seqused_q", "seqused_kv", "key_lengths"])
@pytest.mark.parametrize("lengths", [torch.tensor([3, 4]), np.array([3, 4])], ids=["torch", "numpy"])
def test_lengths_of_64_bits(name, lengths):
    q = Q if isinstance(lengths, torch.Tensor) else A
    with pytest.raises(
        TypeError, match=rf"^{name}: got int64\[2\]; expected dtype int32 \(torch: \.int\(\); NumPy: "
    ) as raised:
        attention(q, q, q, **{name: lengths})
    assert "astype('int32')" in str(raised.value)
    right = lengths.int() if isinstance(lengths, torch.Tensor) else lengths.astype("int32")
    assert attention(q, q, q, **{name: right}).shape == q.shape


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("place", range(3))
def test_strides(place, library):
    wide = torch.randn(2, 16, 2, 128)[..., ::2]
    arguments = [Q, Q, Q]
    arguments[place] = wide
    if library == "numpy":
        arguments = [argument.numpy() for argument in arguments]
    with pytest.raises(
        ValueError, match=r"has stride 2; it must be 1 \(torch: \.contiguous\(\); NumPy: numpy\.ascontiguousarray\)"
    ):
        attention(*arguments)
    arguments[place] = wide.contiguous() if library == "torch" else np.ascontiguousarray(wide.numpy())
    assert attention(*arguments).shape == Q.shape


@pytest.mark.parametrize("name", ["k", "v", "bias", "seqused_kv"])
@pytest.mark.parametrize("first", ["torch", "numpy"])
def test_two_libraries_in_one_call(name, first):
    others = {"k": Q, "v": Q, "bias": torch.zeros(16, 16), "seqused_kv": torch.tensor([3, 4], dtype=torch.int32)}
    call = {"q": Q, "k": Q, "v": Q, name: others[name]}
    call = {key: value.numpy() if (first == "numpy") != (key == name) else value for key, value in call.items()}
    library, got = ("a tensor of torch", "ndarray") if first == "torch" else ("an array of numpy", "Tensor")
    with pytest.raises(TypeError, match=f"^{name}: expected {library}, as q is, got {got}$"):
        attention(**call)
