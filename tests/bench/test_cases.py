from dataclasses import replace

import pytest

cases = pytest.importorskip("cases")
import presets  # noqa: E402


def visible_pairs(case):
    """By counting."""
    total = 0
    for length in case.lengths or (case.seq,) * case.batch:
        for i in range(length):
            for j in range(length):
                left = not case.window or j >= i - case.window
                right = j <= i if case.causal else not case.window or j <= i + case.window
                total += left and right
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 5, 100])
def test_windows_are_counted(causal, window):
    case = cases.Case(2, 37, 3, 64, causal=causal, window=window)
    assert case.pairs() == visible_pairs(case)


def test_flops_convention():
    case = cases.Case(2, 1024, 16, 128)
    assert case.flops("forward") == 4 * 2 * 16 * 1024 * 1024 * 128
    assert case.flops("backward") == 2.5 * case.flops("forward")
    assert replace(case, causal=True).flops("forward") == case.flops("forward") / 2
    assert cases.Case(3, 30, 1, 8, lengths=(10, 20, 30)).flops("forward") == 4 * 8 * (100 + 400 + 900)


def test_values_of_another_width_are_counted():
    """Scores and their three gradients' products are as wide as the keys, the rest as the values."""
    case = cases.Case(1, 100, 2, 192, head_dim_v=128)
    assert case.flops("forward") == 2 * 2 * 100 * 100 * (192 + 128)
    assert case.flops("backward") == 2 * 2 * 100 * 100 * (3 * 192 + 2 * 128)
    assert case.bytes("forward") == 2 * 2 * 100 * 2 * (192 + 128)
    learned = cases.Case(1, 100, 2, 64, bias="learned")
    assert learned.bytes("backward") - replace(learned, bias="").bytes("backward") == 2 * 2 * 100 * 100 * 2


def test_a_case_comes_back_from_its_file():
    for case in (*presets.options(), *presets.packed(), *presets.cross(), *presets.wide()):
        assert cases.Case.from_json(case.as_json()) == replace(case, heads_kv=case.kv)
    old = {name: value for name, value in presets.paper()[0].as_json().items() if name not in ("softcap", "bias")}
    assert cases.Case.from_json(old).plain


def test_bytes_count_every_tensor_once():
    case = cases.Case(1, 100, 4, 64, heads_kv=2)
    assert case.bytes("forward") == (2 * 100 * 4 + 2 * 100 * 2) * 64 * 2
    assert case.bytes("backward") == (4 * 100 * 4 + 4 * 100 * 2) * 64 * 2


def test_presets_hold_what_they_say():
    for case in presets.preset("paper") + presets.preset("seq_sweep"):
        assert case.tokens == 16384 and case.heads * case.head_dim == 2048
    assert {(case.heads, case.kv) for case in presets.preset("gqa")} == {(32, 8), (32, 4), (64, 8), (32, 1)}
    assert all(sum(case.lengths) == case.tokens and max(case.lengths) == case.seq for case in presets.preset("packed"))
    assert {case.dtype for case in presets.preset("paper", "float16")} == {"float16"}


def test_decoding_counts_its_queries():
    case = cases.Case(2, 100, 4, 64, heads_kv=2, queries=3, dtype="float32")
    assert case.flops("forward") == 4 * 4 * 64 * 2 * 3 * 100
    assert case.bytes("forward") == (2 * 2 * 3 * 4 + 2 * 2 * 100 * 2) * 64 * 4


def test_unknown_preset_lists_those_that_exist():
    with pytest.raises(
        ValueError,
        match="preset: got 'papers'; allowed: paper, gpt3, seq_sweep, gqa, packed, cpu, cpu_options, cpu_lengths",
    ):
        presets.preset("papers")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq": 0}, "seq: got 0; allowed: 1 or more"),
        ({"dtype": "fp8"}, "dtype: got 'fp8'; allowed: float32, float16, bfloat16"),
        ({"heads_kv": 3}, "heads_kv: got 3; allowed: a divisor of heads, 4"),
        ({"dropout_p": 1.0}, "dropout_p: got 1.0; allowed: from 0 to below 1"),
        ({"bias": "large"}, "bias: got 'large'; allowed: fixed, learned or none"),
    ],
)
def test_a_wrong_axis_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        cases.product({"heads": [4], **{name: [value] for name, value in change.items()}})


def test_product_of_axes():
    found = cases.product({"seq": [128, 256], "causal": [False, True]})
    assert [(c.seq, c.causal) for c in found] == [(128, False), (128, True), (256, False), (256, True)]
