"""Arrays of libraries that this package does not know, if they have __dlpack__ or __cuda_array_interface__. Forward only.

They are read through a library that can also allocate results: NumPy on a CPU, torch or CuPy on a GPU. Nothing is copied
for that. Results are converted back to the library of q if that library offers a conversion.
"""

import sys
from importlib import import_module

from flash_attention.options import Tensors

_CPU_DEVICES = (1, 3, 11)  # DLPack's numbers: host memory, pinned for CUDA, pinned for ROCm
_CUDA_DEVICES = (2, 13)


def is_array(value):
    return hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def run(tensors, options, seed, offset, return_lse):
    q = tensors.q
    bridge = _on_gpu if _is_on_gpu(q) else _on_cpu
    look, attend = bridge(q)
    tensors = Tensors(*(None if tensor is None else look(tensor) for tensor in tensors))
    results = attend(tensors, options, seed, offset, return_lse)
    give_back = _way_back(q)
    return tuple(map(give_back, results)) if return_lse else give_back(results)


def _is_on_gpu(q):
    if hasattr(q, "__dlpack_device__"):
        kind = int(q.__dlpack_device__()[0])
        if kind in _CPU_DEVICES:
            return False
        if kind not in _CUDA_DEVICES:
            raise ValueError(f"q: is on a device that DLPack numbers {kind}; allowed are CPUs and NVIDIA GPUs")
        return True
    return hasattr(q, "__cuda_array_interface__")


def _on_cpu(q):
    numpy = _need("numpy", q)
    from flash_attention.arrays import run

    def look(tensor):
        if isinstance(tensor, numpy.ndarray):
            return tensor
        try:
            return numpy.from_dlpack(tensor)
        except (BufferError, RuntimeError, TypeError):  # bfloat16, which NumPy has from ml_dtypes alone
            if not hasattr(tensor, "numpy"):
                raise
            return tensor.numpy()

    return look, run


def _on_gpu(q):
    """By torch or CuPy: the one that is loaded, otherwise the one that is installed."""
    bridges = {"torch": _by_torch, "cupy": _by_cupy}
    for name in sorted(bridges, key=lambda name: name not in sys.modules):
        try:
            return bridges[name](import_module(name))
        except ImportError:
            continue
    raise ImportError(f"q: {type(q).__name__} on a GPU needs torch or CuPy for the result; neither is installed")


def _by_torch(torch):
    from flash_attention.pytorch.autograd import run

    def look(tensor):
        return torch.as_tensor(tensor, device="cuda") if _has_interface(tensor) else torch.from_dlpack(tensor)

    return look, run


def _by_cupy(cupy):
    from flash_attention.arrays import run

    return lambda tensor: cupy.asarray(tensor) if _has_interface(tensor) else cupy.from_dlpack(tensor), run


def _has_interface(tensor):
    return hasattr(tensor, "__cuda_array_interface__")


def _need(name, q):
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(f"q: {type(q).__name__} needs {name}, which allocates the result: pip install {name}") from None


def _way_back(q):
    """The function that converts an array of the bridge's library to q's; without one the result is not converted."""
    module = type(q).__module__.partition(".")[0]
    if hasattr(q, "__array_namespace__"):
        return q.__array_namespace__().from_dlpack
    if module == "numba":
        return import_module("numba.cuda").as_cuda_array
    if module == "tensorflow":
        tensorflow = import_module("tensorflow")

        def to_tensorflow(result):
            if str(result.dtype) == "bfloat16" and not hasattr(result, "is_cuda"):
                return tensorflow.convert_to_tensor(result)  # a NumPy array that DLPack does not take
            return tensorflow.experimental.dlpack.from_dlpack(result.__dlpack__())

        return to_tensorflow
    library = sys.modules.get(module)
    return getattr(library, "from_dlpack", None) or (lambda result: result)
