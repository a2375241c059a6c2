"""Functions that are no programs: each is refused with its line and what is allowed."""

import pytest
import torch
from flash_attention import attention, create_block_mask, flex_attention, masks
from flash_attention.flex import ProgramError
from flash_attention.flex.program import record
from torch.nn.attention import flex_attention as flex

Q = torch.randn(1, 2, 16, 8)
TABLE = torch.randn(2, 16)
WIDE = torch.zeros(2, 129)


def refused(score_mod=None, mask_mod=None):
    with pytest.raises(ProgramError) as error:
        block_mask = None if mask_mod is None else create_block_mask(mask_mod, 1, 2, 16, 16)
        flex_attention(Q, Q, Q, score_mod, block_mask)
    return str(error.value)


def test_branch():
    def score_mod(s, b, h, i, j):
        if i > j:  # the line
            return s
        return s * 2

    message = refused(score_mod)
    assert "if i > j:  # the line" in message and "branches" in message and "torch.where" in message
    assert "test_flex_errors.py" in message


def test_value():
    assert "item" in refused(lambda s, b, h, i, j: s * i.item())
    assert "__int__" in refused(lambda s, b, h, i, j: s * int(i))
    assert "__index__" in refused(lambda s, b, h, i, j: s * [1, 2][i])


def test_result():
    assert "returned a tensor of dtype torch.int32" in refused(lambda s, b, h, i, j: i)
    assert "returned NoneType" in refused(lambda s, b, h, i, j: None)
    assert "returned a tensor of dtype torch.float32" in refused(None, lambda b, h, i, j: TABLE[h, i])
    assert "mask_mod" in refused(None, lambda b, h, i, j: i - j)


def test_captured_tensors():
    wave = torch.zeros(16, dtype=torch.complex64)
    deep = torch.zeros(1, 1, 1, 1, 1)
    assert "torch.complex64" in refused(lambda s, b, h, i, j: s + wave[i].real)
    assert "at most 4" in refused(lambda s, b, h, i, j: s + deep[b, b, b, b, b])
    assert "index more of its axes" in refused(lambda s, b, h, i, j: (s + WIDE).sum())
    assert "shape [16]; expected is a float without axes" in refused(lambda s, b, h, i, j: s + TABLE[h])
    assert "3 indices" in refused(lambda s, b, h, i, j: s + TABLE[h, i, j])
    assert "an index of type NoneType" in refused(lambda s, b, h, i, j: s + TABLE[h, None])
    assert "indexed by one" in refused(lambda s, b, h, i, j: s + (TABLE[h] * 2)[i])
    assert "has no memory" in refused(lambda s, b, h, i, j: s + torch.arange(16, device=h.device)[i])
    assert "indices" not in record(lambda s, b, h, i, j: s + TABLE[h][i]).text  # one after the other is fine
    many = [torch.zeros(16) for _ in range(9)]
    assert "more than 8" in refused(lambda s, b, h, i, j: s + sum(tensor[i] for tensor in many))


def test_index_out_of_range():
    message = refused(lambda s, b, h, i, j: s + TABLE[h, i + 1])
    assert "from 1 to 16" in message and "allowed are -16 to 15" in message and "TABLE[h, i + 1]" in message
    assert "from 0 to 240" in refused(lambda s, b, h, i, j: s + TABLE[h, i * 16])
    flex_attention(Q, Q, Q, lambda s, b, h, i, j: s + TABLE[h, i - (i // 16) * 16])  # it stays inside
    flex_attention(Q, Q, Q, lambda s, b, h, i, j: s + TABLE[h, i - 16])  # from the end, as torch has it


def test_operations():
    message = refused(lambda s, b, h, i, j: torch.erfinv(s))
    assert "aten::erfinv" in message and "tanh" in message
    assert "not allowed" in refused(lambda s, b, h, i, j: torch.stack([s, s]).softmax(0)[0])
    assert "allowed are powers from 0" in refused(lambda s, b, h, i, j: s + i**-1)
    assert "only reads" in refused(lambda s, b, h, i, j: TABLE.__setitem__((h, i), s))
    assert "only reads" in refused(lambda s, b, h, i, j: torch.zeros(()).add_(s))
    assert "in place" in refused(lambda s, b, h, i, j: s + i.add_(0.5))


def test_errors_of_the_function_itself():
    """Whatever it raises comes with its line and the name of the argument."""
    message = refused(lambda s, b, h, i, j: s @ s)
    assert message.startswith("score_mod: test_flex_errors.py") and "s @ s" in message and "RuntimeError" in message
    message = refused(None, lambda b, h, i, j: i < 1 / 0)
    assert message.startswith("mask_mod: test_flex_errors.py") and "ZeroDivisionError" in message
    message = refused(lambda s, b, h, i: s)  # no line of it has run
    assert "expected a function of (score, b, h, q_idx, kv_idx), got one of (s, b, h, i)" in message
    assert "numpy" in refused(lambda s, b, h, i, j: s + TABLE.numpy()[h, i])


def causal(b, h, i, j):
    return i >= j


@pytest.mark.parametrize("make", [create_block_mask, flex.create_block_mask], ids=["ours", "torch"])
def test_block_masks_of_other_sizes(make):
    """As torch has it: a mask is for the sizes that it was made for."""
    for sizes, named in (
        ((None, None, 12, 16), "Q_LEN 12"),
        ((None, None, 16, 32), "KV_LEN 32"),
        ((None, None, 16, 130), "KV_LEN 130"),
        ((3, None, 16, 16), "batch 3"),
        ((None, 4, 16, 16), "heads 4"),
    ):
        with pytest.raises(ValueError, match=f"block_mask: was made for {named}; "):
            flex_attention(Q, Q, Q, block_mask=make(causal, *sizes, device="cpu"))
    for sizes in ((None, None, 16, 16), (1, 2, 16, 16)):
        flex_attention(Q, Q, Q, block_mask=make(causal, *sizes, device="cpu"))
    flex_attention(Q, Q, Q, block_mask=create_block_mask(causal))  # for any size
    flex_attention(Q, Q, Q, block_mask=flex._create_empty_block_mask(Q, Q))


def test_arguments():
    with pytest.raises(TypeError, match="'BLOCKSIZE'; it is called BLOCK_SIZE here"):
        create_block_mask(causal, BLOCKSIZE=64)
    create_block_mask(causal, _compile=True)
    with pytest.raises(ValueError, match="return_lse: got True beside return_aux"):
        flex_attention(Q, Q, Q, return_lse=True, return_aux=flex.AuxRequest(lse=True))


def test_what_is_no_function():
    with pytest.raises(TypeError, match="score_mod: expected a function, got int"):
        flex_attention(Q, Q, Q, 3)
    with pytest.raises(TypeError, match="mask_mod: expected a function"):
        create_block_mask(3, 1, 1, 16, 16)
    with pytest.raises(TypeError, match="block_mask: expected what create_block_mask gives, got"):
        flex_attention(Q, Q, Q, None, lambda b, h, i, j: i >= j)
    with pytest.raises(TypeError, match=r"got flash_attention.masks.blocks.BlockMask; attention\(\) takes other masks"):
        flex_attention(Q, Q, Q, None, masks.BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), (16, 16)))
    with pytest.raises(ValueError, match="enable_gqa"):
        flex_attention(Q, Q[:, :1], Q[:, :1])


def test_combinations():
    q = Q.transpose(1, 2)
    with pytest.raises(NotImplementedError, match="takes no program"):
        attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 2, kernel="standard")


def test_transforms():
    with pytest.raises(NotImplementedError, match=r"transforms of torch.func"):
        torch.func.grad(lambda q: flex_attention(q, Q, Q, lambda s, b, h, i, j: s * 2).sum())(Q)


def test_second_derivatives():
    q = Q.clone().requires_grad_()
    out = flex_attention(q, Q, Q, lambda s, b, h, i, j: s * 2)
    (dq,) = torch.autograd.grad(out.sum(), [q], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dq.sum().backward()


def test_tensors_without_strides():
    q = torch.randn(1, 2, 8, 16)
    for name, other in (("k", q.to_sparse()), ("v", torch.nested.nested_tensor([q[0]]))):
        given = {"q": q, "k": q, "v": q} | {name: other}
        with pytest.raises(TypeError, match=f"{name}: got"):
            attention(**given, layout="bhsd", mask_mod=lambda b, h, i, j: i >= j)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x * x  # in the function

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@pytest.mark.parametrize("kind", [Cube, Reversed])
def test_functions_of_autograd(kind):
    """Their own backward would not be called: no gradients; without them they are recorded."""

    def score_mod(s, b, h, i, j):
        return kind.apply(s)

    q = Q.clone().requires_grad_()
    for _ in range(2):  # recorded, and remembered
        with pytest.raises(ProgramError, match=r"autograd.Function, whose own backward is not called") as error:
            flex_attention(q, Q, Q, score_mod)
        assert "test_flex_errors.py" in str(error.value)
    expected = flex_attention(Q, Q, Q, lambda s, b, h, i, j: s * s * s if kind is Cube else s)
    with torch.no_grad():
        assert torch.equal(flex_attention(q, Q, Q, score_mod), expected)
    assert torch.equal(flex_attention(Q, Q, Q, score_mod), expected)
    mask = create_block_mask(lambda b, h, i, j: kind.apply(i * 1.0) >= 0)  # of which nothing is derived
    flex_attention(q, Q, Q, lambda s, b, h, i, j: s * 2, mask).sum().backward()


class Outer(torch.autograd.Function):
    """Differentiates inside of its forward pass."""

    @staticmethod
    def forward(ctx, q):
        def score_mod(s, b, h, i, j):
            with torch.no_grad():
                factor = torch.tanh(s)
            return s * factor

        with torch.enable_grad():
            q = q.detach().requires_grad_()
            return torch.autograd.grad(flex_attention(q, Q, Q, score_mod).sum(), q)[0]


def test_a_function_of_autograd_around_the_call():
    """It is none of the score_mod's, whose no_grad counts."""
    q = Q.clone().requires_grad_()
    out = flex_attention(q, Q, Q, lambda s, b, h, i, j: s * torch.tanh(s).detach())
    assert torch.equal(Outer.apply(Q), torch.autograd.grad(out.sum(), q)[0])


@pytest.mark.parametrize("value", [2**32, -(2**31) - 1])
def test_ints_beyond_32_bits(value):
    """By their low bits, 2**32 would be 0."""
    ids = torch.zeros(16, dtype=torch.int64)
    mask = create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 16, 16)
    flex_attention(Q, Q, Q, None, mask)
    ids[3] = value
    with pytest.raises(ProgramError, match=rf"ids\[i\] == ids\[j\].*\n.*holds {value}, which does not fit into 32 bits"):
        flex_attention(Q, Q, Q, None, mask)
    ids[:2] = torch.tensor([2**31 - 1, -(2**31)])
    ids[3] = 0
    flex_attention(Q, Q, Q, None, mask)
