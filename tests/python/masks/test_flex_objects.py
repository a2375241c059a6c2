"""What torch has beside the function itself: its objects, in and out."""

import pytest
import torch
from flash_attention import flex_attention
from flex_formula import tensors


def test_what_is_asked_for_besides():
    """torch's own AuxOutput, which may be taken apart by name and by place."""
    torch_flex = pytest.importorskip("torch.nn.attention.flex_attention")
    if not hasattr(torch_flex, "AuxRequest"):
        pytest.skip("this torch has no AuxRequest")
    q, k, v = (tensor.detach() for tensor in tensors())
    out, found = flex_attention(q, k, v, return_aux=torch_flex.AuxRequest(lse=True))
    assert isinstance(found, torch_flex.AuxOutput) and found.max_scores is None
    same, lse = flex_attention(q, k, v, return_lse=True)
    assert torch.equal(out, same) and torch.equal(found.lse, lse)
    assert flex_attention(q, k, v, return_aux=torch_flex.AuxRequest())[1].lse is None
