"""Every refusal names the argument."""

import flash_attention
import pytest
import torch
from flash_attention import attention, attention_packed


def tensor(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


Q = tensor(2, 8, 4, 16)
STARTS = torch.tensor([0, 3, 8], dtype=torch.int32)
MISTAKES = [
    (ValueError, "q", lambda: attention(tensor(8, 4, 16), Q, Q)),
    (ValueError, "k", lambda: attention(Q, tensor(1, 8, 4, 16), Q)),
    (ValueError, "k", lambda: attention(Q, tensor(2, 8, 4, 32), Q)),
    (ValueError, "v", lambda: attention(Q, Q, tensor(2, 9, 4, 16))),
    (ValueError, "heads", lambda: attention(Q, tensor(2, 8, 3, 16), tensor(2, 8, 3, 16))),
    (ValueError, "head_dim", lambda: attention(*(tensor(2, 8, 4, 12),) * 3)),
    (ValueError, "head_dim", lambda: attention(*(tensor(2, 8, 4, 264),) * 3)),
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_one_device():
    with pytest.raises(ValueError, match="k: is on"):
        attention(Q.cuda(), Q, Q)
