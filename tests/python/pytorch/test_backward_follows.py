"""A forward pass tells the library that a backward pass follows: a GPU then compiles its kernels in the background."""

import flash_attention
import pytest
import torch
from flash_attention import flex_attention
from flash_attention.pytorch import ops


@pytest.fixture
def told(monkeypatch):
    """What each forward pass was told."""
    found = []
    forward = ops._core.forward

    def record(*arguments, backward=None, **more):
        found.append(backward)
        return forward(*arguments, backward=backward, **more)

    program_forward = ops._core.program_forward

    def record_program(*arguments):
        found.append(arguments[6])  # q, k, v, options, program, with_lse, backward, kept
        return program_forward(*arguments)

    monkeypatch.setattr(ops._core, "forward", record)
    monkeypatch.setattr(ops._core, "program_forward", record_program)
    return found


def qkv(requires_grad):
    return [torch.randn(1, 5, 2, 8, requires_grad=requires_grad) for _ in range(3)]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_call_with_options(told, requires_grad):
    flash_attention.attention(*qkv(requires_grad), bias=torch.zeros(5, 5), dropout_p=0.5, seed=3)
    assert told == [0 if requires_grad else None]


def test_no_gradient_is_to_come(told):
    with torch.no_grad():
        flash_attention.attention(*qkv(True), bias=torch.zeros(5, 5), dropout_p=0.5, seed=3)
    assert told == [None]


@pytest.mark.parametrize(("learned", "bits"), [(False, 0), (True, 1)])
def test_programs_tell_which_captured_tensors_have_gradients(told, learned, bits):
    table = torch.zeros(9, requires_grad=learned)
    q, k, v = (tensor.transpose(1, 2) for tensor in qkv(True))
    flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + table[i - j + 4])
    assert set(told) == {bits}  # twice with torch 2.9, where the C function hands the call on
