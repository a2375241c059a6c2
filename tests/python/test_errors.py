"""Every refusal names the argument."""

import ctypes

import flash_attention
import numpy
import pytest
import torch
from flash_attention import _core, attention, attention_packed, flash_attn
from flash_attention.append import append_kv
from flash_attention.options import Options


def tensor(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def nested(layout):
    return torch.nested.nested_tensor([torch.zeros(3, 4, 16), torch.zeros(5, 4, 16)], layout=layout)


Q = tensor(2, 8, 4, 16)
ONES = numpy.ones((2, 8, 4, 16), "f4")
STARTS = torch.tensor([0, 3, 8], dtype=torch.int32)
# torch 2.9 hands out no float8 by DLPack, so that the tensor is no tensor of a known kind there.
IS_READ = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
FLOAT8_KEYS = "k: got float8_e4m3fn" if IS_READ else "k: expected a tensor .* of dtype torch.float8_e4m3fn"
MISTAKES = [
    (ValueError, "q", lambda: attention(tensor(8, 4, 16), Q, Q)),
    (ValueError, "k", lambda: attention(Q, tensor(1, 8, 4, 16), Q)),
    (ValueError, "k", lambda: attention(Q, tensor(2, 8, 4, 32), Q)),
    (ValueError, "v", lambda: attention(Q, Q, tensor(2, 9, 4, 16))),
    (ValueError, "heads", lambda: attention(Q, tensor(2, 8, 3, 16), tensor(2, 8, 3, 16))),
    (ValueError, "head_dim", lambda: attention(*(tensor(2, 8, 4, 0),) * 3)),
    (ValueError, "head_dim", lambda: attention(*(tensor(2, 8, 4, 584),) * 3)),
    (ValueError, "head_dim_v", lambda: attention(Q, Q, Q[..., :0])),
    (ValueError, "head_dim_v", lambda: attention(ONES, ONES, ONES[..., :0])),
    (ValueError, "head_dim_v", lambda: attention_packed(Q[0], Q[0], Q[0, ..., :0], STARTS)),
    (ValueError, "head_dim_v", lambda: flash_attention.attention_over_cache(Q, Q, Q[..., :0])),
    (ValueError, "v_cache", lambda: append_kv(Q, tensor(2, 8, 4, 0), Q[:, :1], tensor(2, 1, 4, 0))),
    (ValueError, "window: got 9223372036854775808", lambda: attention(Q, Q, Q, window=(2**63, 0))),
    (TypeError, FLOAT8_KEYS, lambda: attention(Q, Q.to(torch.float8_e4m3fn), Q)),
    (TypeError, "q: expected .* of dtype >f4", lambda: attention(*(ONES.astype(">f4"),) * 3)),
    (TypeError, "k: got a masked array", lambda: attention(ONES, numpy.ma.masked_less(ONES, 0), ONES)),
    (ValueError, "qkv: got shape", lambda: flash_attn.flash_attn_qkvpacked_func(torch.stack([Q, Q], 2))),
    (ValueError, "qkv: got shape", lambda: flash_attn.flash_attn_qkvpacked_func(Q)),
    (ValueError, "kv: got shape", lambda: flash_attn.flash_attn_kvpacked_func(Q, Q)),
    (ValueError, "kv: got shape", lambda: flash_attn.flash_attn_varlen_kvpacked_func(Q[0], Q, STARTS, STARTS)),
    (ValueError, "q", lambda: attention(tensor(2, 8, 16, 4).transpose(2, 3), Q, Q)),
    (TypeError, "q", lambda: attention(Q.double(), Q.double(), Q.double())),
    (TypeError, "k", lambda: attention(Q, Q.half(), Q)),
    (TypeError, "q", lambda: attention([1.0], Q, Q)),
    (TypeError, "v", lambda: attention(Q, Q, None)),
    (ValueError, "bias", lambda: attention(Q, Q, Q, bias=tensor(3, 8, 8))),
    (TypeError, "bias", lambda: attention(Q, Q, Q, bias=tensor(8, 8, dtype=torch.int32))),
    (TypeError, "bias", lambda: attention(Q, Q, Q, bias=[0.0])),
    (TypeError, "sink", lambda: attention(Q, Q, Q, sink=1.0)),
    (TypeError, "key_lengths", lambda: attention(Q, Q, Q, key_lengths=[1, 2])),
    (TypeError, "mask", lambda: attention(Q, Q, Q, mask=tensor(8, 8))),
    (ValueError, "alibi_slopes", lambda: attention(Q, Q, Q, alibi_slopes=tensor(3))),
    (ValueError, "sink", lambda: attention(Q, Q, Q, sink=tensor(5))),
    (TypeError, "key_lengths", lambda: attention(Q, Q, Q, key_lengths=torch.tensor([1, 2]))),
    (ValueError, "seqused_kv", lambda: attention(Q, Q, Q, seqused_kv=torch.tensor([1], dtype=torch.int32))),
    (ValueError, "dropout_p", lambda: attention(Q, Q, Q, dropout_p=1.0)),
    (ValueError, "dropout_p", lambda: attention(Q, Q, Q, dropout_p=-0.1)),
    (ValueError, "softcap", lambda: attention(Q, Q, Q, softcap=-1.0)),
    (TypeError, "causal", lambda: attention(Q, Q, Q, causal=1)),
    (TypeError, "scale", lambda: attention(Q, Q, Q, scale="small")),
    (TypeError, "deterministic", lambda: attention(Q, Q, Q, deterministic="yes")),
    (ValueError, "window", lambda: attention(Q, Q, Q, window=3)),
    (ValueError, "layout", lambda: attention(Q, Q, Q, layout="sbhd")),
    (ValueError, "alignment", lambda: attention(Q, Q, Q, alignment="middle")),
    (ValueError, "kernel", lambda: attention(Q, Q, Q, kernel="forward/nothing")),
    (TypeError, "cu_seqlens_q", lambda: attention_packed(Q[0], Q[0], Q[0], None)),
    (TypeError, "cu_seqlens_q", lambda: attention_packed(Q[0], Q[0], Q[0], STARTS.long())),
    (ValueError, "cu_seqlens_kv", lambda: attention_packed(Q[0], Q[0], Q[0], STARTS, STARTS[:2])),
    (ValueError, "cu_seqlens_q", lambda: attention_packed(Q[0], Q[0], Q[0], STARTS.flip(0), STARTS)),
    (ValueError, "q", lambda: attention_packed(Q, Q, Q, STARTS)),
    (ValueError, "seed", lambda: attention(Q, Q, Q, dropout_p=0.1, seed=-1)),
    (ValueError, "seed", lambda: attention(Q, Q, Q, dropout_p=0.1, seed=2**64)),
    (TypeError, "seed", lambda: attention(Q, Q, Q, dropout_p=0.1, seed=0.5)),
    (ValueError, "offset", lambda: attention(Q, Q, Q, dropout_p=0.1, seed=1, offset=-1)),
    (ValueError, "seed", lambda: flash_attention.dropout_mask((1, 1, 2, 2), 0.5, -1)),
    (TypeError, "k: expected a tensor of torch", lambda: attention(Q, Q.detach().numpy(), Q)),
    (TypeError, "bias: expected a tensor of torch", lambda: attention(Q, Q, Q, bias=numpy.zeros((8, 8), "float32"))),
    (TypeError, "key_lengths: expected", lambda: attention(Q, Q, Q, key_lengths=numpy.ones(2, "int32"))),
    (TypeError, "bias: expected an array of numpy", lambda: attention(*(Q.detach().numpy(),) * 3, bias=tensor(8, 8))),
    (ValueError, "k: is on meta", lambda: attention(Q, Q.to("meta"), Q)),
    (ValueError, "k: is on cpu; q is on meta", lambda: attention(Q.to("meta"), Q, Q)),
    (ValueError, "bias: is on meta", lambda: attention(Q, Q, Q, bias=tensor(8, 8).to("meta"))),
    (TypeError, "q: got layout torch.sparse", lambda: attention(*(Q.detach().to_sparse(),) * 3)),
    (TypeError, "k: got layout torch.sparse", lambda: attention(Q, Q.detach().to_sparse(), Q)),
    (TypeError, "q: got a nested tensor", lambda: attention(*(nested(torch.jagged),) * 3)),
    (TypeError, "k: got a nested tensor", lambda: attention(Q, nested(torch.strided), Q)),
    (ValueError, "shape", lambda: flash_attention.dropout_mask((2, 3), 0.5, 1)),
]


@pytest.mark.parametrize("index", range(len(MISTAKES)))
def test_mistake(index):
    kind, name, call = MISTAKES[index]
    with pytest.raises(kind, match=name):
        call()


@pytest.mark.parametrize("index", range(len(MISTAKES)))
def test_mistake_with_gradients(index):
    """The same refusals where gradients are wanted."""
    kind, name, call = MISTAKES[index]
    Q.requires_grad_()
    try:
        with pytest.raises(kind, match=name):
            call()
    finally:
        Q.requires_grad_(False)


class Stranger:
    """Memory of a device that DLPack numbers `device`, at an address that no process has."""

    class _Managed(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int), ("ndim", ctypes.c_int),
            ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
            ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ]  # fmt: skip

    def __init__(self, shape, device):
        self.sizes = (ctypes.c_int64 * len(shape))(*shape)
        self.tensor = self._Managed(0x7F0000001000, device, 0, len(shape), 2, 32, 1, self.sizes)

    def __dlpack_device__(self):
        return self.tensor.device_type, 0

    def __dlpack__(self, **unused):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize("device, name", [(4, "OpenCL"), (8, "Metal"), (10, "ROCm"), (14, "oneAPI"), (99, "99")])
def test_devices_that_cannot_be_read(device, name):
    q = Stranger((1, 4, 2, 8), device)
    out = numpy.empty((1, 4, 2, 8), numpy.float32)
    scalars = tuple(Options())
    with pytest.raises(ValueError, match=f"q: is on .*{name}"):
        _core.forward((q, q, q, *(None,) * 9), scalars, out, None, 0, 0, 0, lambda size: numpy.empty(size, "uint8"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_one_device():
    with pytest.raises(ValueError, match="k: is on"):
        attention(Q.cuda(), Q, Q)
