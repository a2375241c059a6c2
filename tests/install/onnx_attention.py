"""Runs the operator of examples/onnxruntime: python onnx_attention.py LIBRARY. Needs onnx, onnxruntime and NumPy alone."""

import sys

import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper


def model(element, causal):
    names = ("q", "k", "v")
    node = helper.make_node("Attention", names, ["out"], domain="flash_attention", causal=causal)
    inputs = [helper.make_tensor_value_info(name, element, ["b", f"s{name}", f"h{name}", "d"]) for name in names]
    outputs = [helper.make_tensor_value_info("out", element, ["b", "sq", "hq", "d"])]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("flash_attention", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=9).SerializeToString()


def exact(q, k, v, causal):
    """In fp64; k and v have half the heads of q."""
    q, k, v = q.astype(float), *(x.astype(float).repeat(2, axis=2) for x in (k, v))
    s = numpy.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        rows, columns = numpy.indices(s.shape[-2:])
        s = numpy.where(columns <= rows + s.shape[-1] - s.shape[-2], s, -numpy.inf)
    p = numpy.exp(s - s.max(-1, keepdims=True))
    return numpy.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


def main():
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(sys.argv[1])
    random = numpy.random.default_rng(0)
    for element, dtype, limit in ((TensorProto.FLOAT, "float32", 1e-5), (TensorProto.FLOAT16, "float16", 3e-3)):
        for causal in (0, 1):
            session = onnxruntime.InferenceSession(model(element, causal), options, providers=["CPUExecutionProvider"])
            shapes = {"q": (2, 13, 4, 32), "k": (2, 29, 2, 32), "v": (2, 29, 2, 32)}
            inputs = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
            (out,) = session.run(None, inputs)
            error = abs(out.astype(float) - exact(*inputs.values(), causal)).max()
            assert out.dtype == dtype and error < limit, (dtype, causal, error)
            try:
                session.run(None, {**inputs, "v": inputs["v"][:, :5]})
            except Exception as refused:
                assert "each other's length" in str(refused)
            else:
                raise AssertionError("v of another length than k was taken")
    print(f"right, onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}")


main()
