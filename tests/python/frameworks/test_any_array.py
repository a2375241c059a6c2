"""attention() on arrays of any library: bfloat16 of NumPy, DLPack alone, and stand-ins for libraries that are large.

The stand-ins have the interfaces of TensorFlow 2.20, Numba 0.61 and CuPy 13 as far as they are used, over host memory.
"""

import sys
import types

import flash_attention
import numpy
import pytest
import reference
import torch
from flash_attention import any_array

SHAPE = (2, 12, 4, 32)


@pytest.fixture
def inputs():
    generator = numpy.random.default_rng(3)
    return [generator.standard_normal(SHAPE).astype(numpy.float32) for _ in range(3)]


def expected(inputs):
    return reference.attention(*(torch.from_numpy(x.astype(numpy.float64)) for x in inputs), causal=True)


def close(ours, theirs, atol=1e-5):
    numpy.testing.assert_allclose(numpy.asarray(ours).astype(numpy.float64), theirs, atol=atol, rtol=1e-4)


def test_bfloat16_of_numpy(inputs):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rounded = [x.astype(bfloat16) for x in inputs]
    rounded[1].flags.writeable = False
    out, lse = flash_attention.attention(*rounded, causal=True, return_lse=True)
    assert out.dtype == bfloat16 and lse.dtype == numpy.float32
    for ours, theirs in zip((out, lse), expected(rounded), strict=True):
        close(ours, theirs, 2e-2)
    bias = numpy.zeros((12, 12), dtype=bfloat16)
    bias[:, 0] = -numpy.inf
    with_bias = flash_attention.attention(*rounded, bias=bias)
    mask = numpy.ones((12, 12), dtype=bool)
    mask[:, 0] = False
    assert (with_bias == flash_attention.attention(*rounded, mask=mask)).all()


def test_other_16_bit_types_are_not_taken_for_it(inputs):
    with pytest.raises(TypeError, match="q: "):
        flash_attention.attention(*(x.astype(numpy.uint16) for x in inputs))


class Opaque:
    """DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack_alone(inputs):
    out, lse = flash_attention.attention(*map(Opaque, inputs), causal=True, return_lse=True)
    assert isinstance(out, numpy.ndarray)
    for ours, theirs in zip((out, lse), expected(inputs), strict=True):
        close(ours, theirs)
    starts = Opaque(numpy.array([0, 5, 12], dtype=numpy.int32))
    packed = [x[0] for x in inputs]
    ours = flash_attention.attention_packed(*map(Opaque, packed), starts)
    assert (ours == flash_attention.attention_packed(*packed, starts.array)).all()


def test_nothing_is_copied_on_the_way_in(inputs, monkeypatch):
    seen = []
    original = flash_attention._core.forward

    def forward(tensors, *rest, **named):
        seen.extend(x.__array_interface__["data"][0] for x in tensors[:3])
        return original(tensors, *rest, **named)

    monkeypatch.setattr("flash_attention.arrays._core", types.SimpleNamespace(forward=forward))
    flash_attention.attention(*map(Opaque, inputs))
    assert seen == [x.__array_interface__["data"][0] for x in inputs]


def test_the_namespace_of_the_array_api(inputs):
    class Array(Opaque):
        def __array_namespace__(self):
            return types.SimpleNamespace(from_dlpack=lambda x: Array(numpy.from_dlpack(x)))

    out = flash_attention.attention(*map(Array, inputs), causal=True)
    assert type(out) is Array
    close(out.array, expected(inputs)[0])


def stand_in(monkeypatch, name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensorflow(inputs, dtype, monkeypatch):
    if dtype == "bfloat16":
        inputs = [x.astype(pytest.importorskip("ml_dtypes").bfloat16) for x in inputs]

    class EagerTensor(Opaque):
        def numpy(self):
            return self.array

    EagerTensor.__module__ = "tensorflow.python.framework.ops"
    back = types.SimpleNamespace(from_dlpack=lambda capsule: EagerTensor(from_capsule(capsule)))
    module = stand_in(monkeypatch, "tensorflow", convert_to_tensor=EagerTensor)
    module.experimental = types.SimpleNamespace(dlpack=back)
    out = flash_attention.attention(*map(EagerTensor, inputs), causal=True)
    assert type(out) is EagerTensor and str(out.array.dtype) == dtype
    close(out.array, expected(inputs)[0], 1e-5 if dtype == "float32" else 2e-2)


def from_capsule(capsule):
    return torch.utils.dlpack.from_dlpack(capsule).numpy()


def test_cupy(inputs, monkeypatch):
    class Array(numpy.ndarray):
        pass

    Array.__module__ = "cupy"
    streams = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=0))
    members = {"ndarray": Array, "empty": lambda *a, **k: numpy.empty(*a, **k).view(Array), "cuda": streams}
    stand_in(monkeypatch, "cupy", **members)
    monkeypatch.setattr(flash_attention.routes, "_runs", {})
    out = flash_attention.attention(*(x.view(Array) for x in inputs), causal=True)
    assert type(out) is Array
    close(out, expected(inputs)[0])


class DeviceArray:
    """What Numba's arrays on a GPU show."""

    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = array.__array_interface__


DeviceArray.__module__ = "numba.cuda.cudadrv.devicearray"
DeviceArray.__cuda_array_interface__ = None  # the type shows it, too


def test_numba_by_way_of_torch_or_cupy(inputs, monkeypatch):
    stand_in(monkeypatch, "numba")
    stand_in(monkeypatch, "numba.cuda", as_cuda_array=lambda x: DeviceArray(numpy.asarray(x)))
    looked = []

    def as_tensor(x, device):
        looked.append(device)
        return torch.from_numpy(x.array)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    out = flash_attention.attention(*map(DeviceArray, inputs), causal=True)
    assert type(out) is DeviceArray and looked == ["cuda"] * 3
    close(out.array, expected(inputs)[0])


def test_a_gpu_array_without_a_library_that_allocates(inputs, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match="needs torch or CuPy"):
        any_array._on_gpu(DeviceArray(inputs[0]))


def test_what_is_no_array_or_lies_elsewhere_is_refused(inputs):
    with pytest.raises(TypeError, match="__dlpack__ or __cuda_array_interface__, got list"):
        flash_attention.attention([1], [2], [3])

    class Elsewhere(Opaque):
        def __dlpack_device__(self):
            return (8, 0)

    with pytest.raises(ValueError, match="q: is on a device that DLPack numbers 8"):
        flash_attention.attention(*map(Elsewhere, inputs))
