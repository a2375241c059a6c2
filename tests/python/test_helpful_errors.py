"""A refusal names what makes the argument right, in the caller's library, whichever library came first."""

import inspect
import operator

import flash_attention
import flash_attention.append
import numpy as np
import pytest
import torch
from flash_attention import (
    attention,
    flash_attn,
    flash_attn_3,
    flash_attn_4,
    flash_mla,
    flashinfer,
    masks,
    parallel,
    sparse,
    xformers,
)
from flash_attention.arguments.keywords import refuse_keywords

Q = torch.randn(2, 16, 2, 64)
A = Q.numpy()


@pytest.mark.parametrize("name", ["seqused_q", "seqused_kv", "key_lengths"])
@pytest.mark.parametrize("lengths", [torch.tensor([3, 4]), np.array([3, 4])], ids=["torch", "numpy"])
def test_lengths_of_64_bits(name, lengths):
    q = Q if isinstance(lengths, torch.Tensor) else A
    with pytest.raises(
        TypeError, match=rf"^{name}: got int64\[2\]; expected dtype int32 \(torch: \.int\(\); NumPy: "
    ) as raised:
        attention(q, q, q, **{name: lengths})
    assert "astype('int32')" in str(raised.value)
    right = lengths.int() if isinstance(lengths, torch.Tensor) else lengths.astype("int32")
    assert attention(q, q, q, **{name: right}).shape == q.shape


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("place", range(3))
def test_strides(place, library):
    wide = torch.randn(2, 16, 2, 128)[..., ::2]
    arguments = [Q, Q, Q]
    arguments[place] = wide
    if library == "numpy":
        arguments = [argument.numpy() for argument in arguments]
    with pytest.raises(
        ValueError, match=r"has stride 2; it must be 1 \(torch: \.contiguous\(\); NumPy: numpy\.ascontiguousarray\)"
    ):
        attention(*arguments)
    arguments[place] = wide.contiguous() if library == "torch" else np.ascontiguousarray(wide.numpy())
    assert attention(*arguments).shape == Q.shape


@pytest.mark.parametrize("name", ["k", "v", "bias", "seqused_kv"])
@pytest.mark.parametrize("first", ["torch", "numpy"])
def test_two_libraries_in_one_call(name, first):
    others = {"k": Q, "v": Q, "bias": torch.zeros(16, 16), "seqused_kv": torch.tensor([3, 4], dtype=torch.int32)}
    call = {"q": Q, "k": Q, "v": Q, name: others[name]}
    call = {key: value.numpy() if (first == "numpy") != (key == name) else value for key, value in call.items()}
    library, got = ("a tensor of torch", "ndarray") if first == "torch" else ("an array of numpy", "Tensor")
    with pytest.raises(TypeError, match=f"^{name}: expected {library}, as q is, got {got}$"):
        attention(**call)


def public_functions():
    """Those with arguments, each once."""
    found = {}
    for module in (
        flash_attention,
        flash_attn,
        flash_attn_3,
        flash_attn_4,
        flash_mla,
        flashinfer,
        masks,
        parallel,
        sparse,
        xformers,
    ):
        for name in getattr(module, "__all__", ()) or [name for name in vars(module) if not name.startswith("_")]:
            function = None if name == "jax" else getattr(module, name)
            if inspect.isfunction(function) and inspect.signature(function).parameters:
                found[f"{module.__name__.removeprefix('flash_attention.')}.{name}"] = function
    return found


FUNCTIONS = public_functions()
# Their options go to attention(), with tensors that come first.
WITH_OPTIONS = ("flash_attention.explain", "flash_attention.compile")
# Nothing but tensors or functions, which are given by place.
BY_PLACE = ("and_masks", "or_masks", "get_", "append_paged", "nvfp4_quantize_append", "merge_state", "fast_decode_plan")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.rpartition(".")[2].startswith(BY_PLACE)])
def test_a_keyword_that_is_not_there(name):
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters.values()
    required = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    tensors = [Q if name in WITH_OPTIONS else None for _ in required]
    given = {each.name: None for each in parameters if each.default is each.empty and each.kind is each.KEYWORD_ONLY}
    if name == "flash_attention.create_block_mask":
        tensors = [lambda b, h, i, j: i >= j]
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_thing'; there are "):
        function(*tensors, **given, no_such_thing=1)


@pytest.mark.parametrize(
    ("function", "wrong", "right"),
    [
        (attention, "is_causal", "causal"),
        (attention, "casual", "causal"),
        (attention, "softmax_scale", "scale"),
        (attention, "window_size", "window"),
        (attention, "attn_mask", "mask or bias"),
        (attention, "dropout", "dropout_p"),
        (attention, "return_lsee", "return_lse"),
        (attention, "soft_cap", "softcap"),
        (attention, "logit_soft_cap", "softcap"),
        (flash_attention.attention_over_cache, "cache_seqlens", "seqused_kv"),
        (flash_attention.attention_packed, "max_seqlen_k", "max_seqlen_kv"),
        (flash_attention.scaled_dot_product_attention, "causal", "is_causal"),
        (flash_attention.flex_attention, "softmax_scale", "scale"),
        (flash_attention.flashmask_attention, "dropout_p", "dropout"),
        (flash_attention.FlashAttention(), "is_causal", "causal"),
        (flash_attention.explain, "is_causal", "causal"),
        (flash_attn.flash_attn_func, "is_causal", "causal"),
        (flash_attn.flash_attn_func, "scale", "softmax_scale"),
        (flash_attn_3.flash_attn_func, "window", "window_size"),
        (flash_attn_4.flash_attn_func, "sinks", "learnable_sink"),
        (xformers.memory_efficient_attention, "attn_mask", "attn_bias"),
    ],
)
def test_the_keyword_of_another_library(function, wrong, right):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'; it is called {right} here$"):
        function(Q, Q, Q, **({"cu_seqlens_q": None} if function is flash_attention.attention_packed else {}), **{wrong: 1})


@pytest.mark.parametrize(
    ("function", "wrong", "there"),
    [
        (flash_attn.flash_attn_func, "attn_mask", "mask and bias"),
        (flash_attn_3.flash_attn_func, "dropout", "dropout_p"),
        (flash_attention.flex_attention, "is_causal", "causal"),
        (flash_attention.scaled_dot_product_attention, "sliding_window", "window"),
        (flash_attention.scaled_dot_product_attention, "deterministic", "deterministic"),
        (xformers.memory_efficient_attention, "causal", "causal"),
    ],
)
def test_what_another_entrance_has_not_attention_has(function, wrong, there):
    with pytest.raises(TypeError, match=rf"'{wrong}'; flash_attention.attention\(\) has {there}; there are q"):
        function(Q, Q, Q, **{wrong: None})
    assert set(there.split(" and ")) <= set(inspect.signature(attention).parameters)


def test_what_is_no_attention_is_not_told_of_it():
    with pytest.raises(TypeError, match="'is_causal'; there are x, "):
        flash_attention.quantize(Q, is_causal=True)


@pytest.mark.parametrize("layer", [flash_attention.FlashAttention, flash_attention.StandardAttention])
def test_a_layer_refuses_an_option_when_it_is_made(layer):
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'; it is called causal here$"):
        layer(casual=True)
    out = layer(causal=True, window=(2, 0))(Q, Q, Q)
    assert torch.equal(out, attention(Q, Q, Q, causal=True, window=(2, 0), layout="bhsd", kernel=layer.kernel))


@pytest.mark.parametrize(
    ("wrong", "said"), [("logit_softcap", "it is called logits_soft_cap here"), ("num_heads", "there are pos_enc")]
)
def test_a_plan_says_what_it_takes(wrong, said):
    tables = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 1], [0], [8])]
    with pytest.raises(TypeError, match=rf"^plan\(\) got an unexpected keyword argument '{wrong}'; {said}"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1)).plan(*tables, 4, 2, 64, 8, **{wrong: 1})


def test_a_keyword_that_is_not_needed():
    with pytest.raises(TypeError, match="'enable_gqa'; it is not needed: k and v may have fewer heads"):
        attention(Q, Q, Q, enable_gqa=True)


def test_names_of_one_thing_are_in_one_group():
    from flash_attention.arguments import keywords

    names = [name for group in keywords._SAME for name in group]
    assert len(names) == len(set(names))
    arguments = set(inspect.signature(attention).parameters) - {"wrong"}
    for group in keywords._SAME:
        assert len(arguments & set(group)) <= 2, group


def test_the_names_that_are_said_are_those_of_the_function():
    def function(q, *, causal, **wrong):
        refuse_keywords(function, wrong)

    with pytest.raises(TypeError, match=r"there are q, causal$"):
        function(1, causal=2, other=3)


@pytest.mark.parametrize("name", sorted(flash_attention._PLACES))
def test_a_name_that_is_elsewhere(name):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; it is flash_attention\.([\w.]+)$") as raised:
        getattr(flash_attention, name)
    assert callable(operator.attrgetter(str(raised.value).partition("it is flash_attention.")[2])(flash_attention))
    with pytest.raises(AttributeError, match=r"has no attribute 'no_such_thing'$"):
        flash_attention.no_such_thing  # noqa: B018


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.zeros(16, 16), r"float32\[16, 16\]; expected dtype bool; numbers that are added to scores are a bias$"),
        (
            torch.ones(16, 16).long(),
            r"int64\[16, 16\]; expected dtype bool \(torch: \.bool\(\); NumPy: \.astype\(bool\)\)$",
        ),
    ],
)
def test_a_mask_of_numbers(mask, said):
    with pytest.raises(TypeError, match="^mask: got " + said):
        attention(Q, Q, Q, mask=mask)


@pytest.mark.parametrize(
    ("name", "function", "expected"),
    [
        ("score_mod", lambda score: score, r"\(score, b, h, q_idx, kv_idx\), got one of \(score\)"),
        ("score_mod", lambda b, h, i, j: b, r"\(score, b, h, q_idx, kv_idx\), got one of \(b, h, i, j\)"),
        ("mask_mod", lambda i, j: i >= j, r"\(b, h, q_idx, kv_idx\), got one of \(i, j\)"),
    ],
)
def test_a_function_of_other_arguments(name, function, expected):
    with pytest.raises(
        ValueError, match=rf"(?s)^{name}: .*test_helpful_errors.py:\d+\n  expected a function of {expected}$"
    ):
        attention(Q, Q, Q, **{name: function})


def test_a_mistake_inside_of_a_function_is_its_own():
    with pytest.raises(ValueError, match=r"(?s)^score_mod: .*TypeError: .*takes 0 positional arguments"):
        attention(Q, Q, Q, score_mod=lambda score, b, h, i, j: (lambda: score)(1))


@pytest.mark.parametrize("budget", ["60", None, True])
def test_a_budget_is_a_number(budget):
    with pytest.raises(TypeError, match=f"^budget: expected seconds, got {type(budget).__name__}$"):
        flash_attention.tune(budget=budget)


WRONG_MASK = torch.ones(3, 3, dtype=torch.bool)
HEADS_FIRST = Q.transpose(1, 2)
LAYER = flash_attention.MultiheadAttention(64, 4, batch_first=True)
X = torch.randn(2, 10, 64)
STARTS = torch.tensor([0, 16], dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("attn_mask", lambda: flash_attention.scaled_dot_product_attention(*[HEADS_FIRST] * 3, attn_mask=WRONG_MASK)),
        (
            "attn_mask",
            lambda: flash_attention.scaled_dot_product_attention(*[HEADS_FIRST] * 3, attn_mask=WRONG_MASK.float()),
        ),
        ("attn_mask", lambda: LAYER(X, X, X, need_weights=False, attn_mask=WRONG_MASK)),
        ("key_padding_mask", lambda: LAYER(X, X, X, need_weights=False, key_padding_mask=WRONG_MASK)),
        ("window_size[0]", lambda: flash_attn.flash_attn_func(Q, Q, Q, window_size=(-3, 0))),
        ("cu_seqlens_k", lambda: flash_attn.flash_attn_varlen_func(*[Q[0]] * 3, STARTS, STARTS.long(), 16, 16)),
        ("window_size[0]", lambda: flash_attn_4.flash_attn_func(Q, Q, Q, window_size=(-3, 0))),
        ("learnable_sink", lambda: flash_attn_4.flash_attn_func(Q, Q, Q, learnable_sink=torch.ones(3))),
        ("attn_bias", lambda: xformers.memory_efficient_attention(Q, Q, Q, attn_bias=WRONG_MASK.float())),
        ("p", lambda: xformers.memory_efficient_attention(Q, Q, Q, p=3)),
        ("logits_soft_cap", lambda: flashinfer.single_prefill_with_kv_cache(*[Q[0]] * 3, logits_soft_cap=-2)),
    ],
)
def test_an_entrance_says_its_own_name_of_an_argument(name, call):
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert str(raised.value).startswith(f"{name}: ")
