"""Set before torch loads: oneDNN's AMX paths round bfloat16 differently, and the comparison is with plain arithmetic."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)
