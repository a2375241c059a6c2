"""What a call is made of, by name: each argument arrives under its own name, wherever the lists have it."""

import flash_attention
import numpy
import pytest
from flash_attention.arguments.options import binding_arguments, make_options
from flash_attention.options import NUM_TENSORS, Options, Tensors, made_deterministic, split

GIVEN = {
    "scale": 0.25, "softcap": 3.0, "causal": True, "window": (5, None), "dropout_p": 0.5, "deterministic": True,
    "max_seqlen_q": 7, "max_seqlen_kv": 9, "block_sizes": (64, 32), "attention_chunk": 11,
    "precision": "fast", "key_block_size": (3, 16), "return_max_logit": True, "return_entropy": True,
}  # fmt: skip


def test_every_argument_arrives_under_its_name():
    options = make_options(**GIVEN, alignment="top_left", layout="bhsd", kernel="cpu/prefill")
    assert options._asdict() == {
        "max_seqlen_q": 7, "max_seqlen_kv": 9, "scale": 0.25, "softcap": 3.0, "causal": True, "top_left": True,
        "window_left": 5, "window_right": -1, "dropout_p": 0.5, "deterministic": True, "heads_first": True,
        "standard": False, "kernel": "cpu/prefill", "mask_block_q": 64, "mask_block_kv": 32,
        "attention_chunk": 11, "precision": "fast", "invariant": None, "list_block_q": 3, "list_block_kv": 16,
        "return_max_logit": True, "return_key_mass": False, "return_entropy": True,
    }  # fmt: skip
    assert make_options(kernel="standard") == Options(standard=True) and make_options() == Options()


@pytest.mark.parametrize("call", ["attention", "attention_packed"])
def test_tensors_of_a_call_arrive_under_their_names(call, monkeypatch):
    """Stand-ins: what comes to the library's run() is what was given."""

    class Stand:
        def __init__(self, name):
            self.name = name

    seen = []
    monkeypatch.setattr(flash_attention.routes, "run_of", lambda q: lambda tensors, *_: seen.append(tensors))
    packed = ("cu_seqlens_q", "cu_seqlens_kv") if call == "attention_packed" else ()
    names = [name for name in Tensors._fields[3:NUM_TENSORS] if not name.startswith("cu_") or name in packed]
    names = [name for name in names if name not in ("hidden_rows", "block_mask")]
    given = {name: Stand(name) for name in ("q", "k", "v", *names)}
    getattr(flash_attention, call)(**given)
    (tensors,) = seen
    assert {name for name, tensor in tensors._asdict().items() if tensor is not None} == set(given)
    assert all(tensor.name == name for name, tensor in tensors._asdict().items() if tensor is not None)
    bound, options = binding_arguments({**given, "kernel": None, "softcap": 2.0})
    assert bound._replace(cu_seqlens_kv=tensors.cu_seqlens_kv) == tensors and options == Options(softcap=2.0)


def test_an_op_takes_them_in_this_order():
    arguments = (*range(NUM_TENSORS), *Options(), "seed", "offset")
    tensors, options, rest = split(arguments)
    assert tensors.key_counts == NUM_TENSORS - 1 and tensors.page_table is None
    assert options == Options() and rest == ("seed", "offset")
    assert made_deterministic(options) == Options(deterministic=True)


@pytest.mark.parametrize("causal", [False, True])
def test_a_bool_of_numpy_is_one(causal):
    q = numpy.random.default_rng(1).standard_normal((1, 9, 2, 16), numpy.float32)
    given, expected = (flash_attention.attention(q, q, q, causal=kind(causal)) for kind in (numpy.bool_, bool))
    assert numpy.array_equal(given, expected)
