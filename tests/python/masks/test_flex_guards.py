"""What was recorded is used again, and never where something that the function can see has changed: more of it than
test_flex_memory.py has, and what is remembered."""

import functools
import gc
import math
import time
import types

import numpy
import pytest
import torch
from flash_attention import and_masks, create_block_mask, flex_attention
from flash_attention.flex import torch_mask
from flash_attention.flex.program import record
from flex_formula import dense, tensors

WIDTH = 3
settings = types.ModuleType("settings")
table = torch.arange(6.0)


class Config:
    width = 3

    def mod(self, s, b, h, i, j):
        return s * self.width


def scaled(factor):
    return lambda s, b, h, i, j: s * factor


def _cell():
    width = 3

    def change():
        nonlocal width
        width = 8

    return lambda s, b, h, i, j: s * width, change


def _default():
    def mod(s, b, h, i, j, width=3):
        return s * width

    return mod, lambda: setattr(mod, "__defaults__", (9,))


def _code():
    def mod(s, b, h, i, j):
        return s * 3.5

    return mod, lambda: setattr(mod, "__code__", (lambda s, b, h, i, j: s * 9.5).__code__)


def _method():
    config = Config()
    return config.mod, lambda: setattr(config, "width", 9)


def _list():
    widths = [3, 4]
    return lambda s, b, h, i, j: s * widths[0], lambda: widths.__setitem__(0, 9)


def _dict():
    widths = {"one": 3}
    return lambda s, b, h, i, j: s * widths["one"], lambda: widths.update(one=9)


def _helper():
    width = 3

    def helper(x):
        return x * width

    def change():
        nonlocal width
        width = 8

    return lambda s, b, h, i, j: helper(s), change


def _helper_itself():
    def helper(x):
        return x * 3.5

    def change():
        nonlocal helper
        helper = lambda x: x * 9.5  # noqa: E731

    return lambda s, b, h, i, j: helper(s), change


def _module():
    settings.width = 3
    return lambda s, b, h, i, j: s * settings.width, lambda: setattr(settings, "width", 9)


def _import():
    def mod(s, b, h, i, j):
        import test_flex_memory_settings

        return s * test_flex_memory_settings.width

    import sys

    sys.modules["test_flex_memory_settings"] = settings
    settings.width = 3
    return mod, lambda: setattr(settings, "width", 9)


def _names_in_text():
    def change():
        global WIDTH
        WIDTH += 4

    return lambda s, b, h, i, j: s * globals()["WIDTH"], change


def _shadow():
    return lambda s, b, h, i, j: s * round(3.4), lambda: globals().__setitem__("round", lambda x: x)


def _attribute_of_a_tensor():
    held = torch.zeros(3)
    held.width = 3
    return lambda s, b, h, i, j: s * held.width + held[h], lambda: setattr(held, "width", 9)


def _strides_of_a_tensor():
    held = torch.zeros(3, 4)
    return lambda s, b, h, i, j: s * held.stride(0), lambda: setattr(held, "data", torch.zeros(4, 3).t())


def _type_of_a_tensor():
    held = torch.zeros(3)
    return lambda s, b, h, i, j: s + held[h], lambda: setattr(held, "data", torch.zeros(3, dtype=torch.float16))


def _shape_of_a_tensor():
    held = torch.zeros(3)
    return lambda s, b, h, i, j: s * held.shape[0] + held[h], lambda: setattr(held, "data", torch.zeros(5))


def _whether_a_tensor_is_learned():
    held = torch.zeros(3)
    return lambda s, b, h, i, j: s * (2.5 if held.requires_grad else 9.5) + held[h], held.requires_grad_


def _state_of_torch():
    return lambda s, b, h, i, j: s * (3.5 if torch.is_grad_enabled() else 9.5), lambda: torch.set_grad_enabled(False)


def _state_by_another_name():
    ask = torch.is_grad_enabled
    return lambda s, b, h, i, j: s * (3.5 if ask() else 9.5), lambda: torch.set_grad_enabled(False)


def _random():
    return lambda s, b, h, i, j: s * numpy.random.rand(), lambda: None


def _clock():
    now = time.perf_counter
    return lambda s, b, h, i, j: s * (now() % 0.1), lambda: None


def _sign_of_zero():
    width = 0.0

    def change():
        nonlocal width
        width = -0.0

    return lambda s, b, h, i, j: s * math.copysign(3.5, width), change


CHANGES = [thing for name, thing in list(globals().items()) if name.startswith("_") and type(thing) is types.FunctionType]


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.set_grad_enabled(True)
    globals().pop("round", None)


@pytest.mark.parametrize("make", CHANGES, ids=lambda make: make.__name__[1:])
def test_a_change_is_seen(make):
    mod, change = make()
    before = [record(mod) for _ in range(2)][1]  # remembered, if it ever is
    change()
    after = record(mod)
    assert (before.text, before.numbers) != (after.text, after.numbers)


REMEMBERED = {
    "number": lambda: scaled(2.75),
    "number of numpy": lambda: scaled(numpy.float64(2.75)),
    "partial": lambda: functools.partial(lambda factor, s, b, h, i, j: s * factor, 2.75),
    "function of torch": lambda: lambda s, b, h, i, j: torch.nn.functional.silu(s),
    "function of torch by its name": lambda silu=torch.nn.functional.silu: lambda s, b, h, i, j: silu(s),
    "tensor": lambda: lambda s, b, h, i, j: s + table[i % table.shape[0]],
    "parts": lambda: lambda s, b, h, i, j, parts=(2.5, [table]): s * parts[0] + parts[1][0][h],
}


@pytest.mark.parametrize("make", REMEMBERED.values(), ids=REMEMBERED)
def test_a_function_is_remembered(make):
    """Or one like it: of the same code, with the same surroundings."""
    assert record(make()).text is record(make()).text


def test_combined_masks_are_remembered():
    def causal(b, h, i, j):
        return i >= j

    def window(width):
        return and_masks(causal, lambda b, h, i, j: i - j < width)

    one, again, other = (record(mask_mod=window(width)) for width in (5, 5, 7))
    assert one.text is again.text and one.numbers == again.numbers == [5]
    assert other.text == one.text and other.numbers == [7]


def test_a_block_mask_follows_what_its_function_sees():
    """By its results: the numbers and tensors of the moment of the call."""
    width, documents = 20, torch.arange(84) // 30

    def mask_mod(b, h, i, j):
        return (i - j < width) & (documents[i] == documents[j]) & (i >= j)

    mask = create_block_mask(mask_mod, None, None, 84, 84)
    q, k, v = (tensor.detach() for tensor in tensors(rows=84, keys=84))

    def check():
        out = flex_attention(q, k, v, block_mask=mask)
        expected, _ = dense(q.double(), k.double(), v.double(), None, mask_mod)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
        return out

    first = check()
    width = 5
    assert not torch.equal(check(), first)
    documents += torch.arange(84) // 40  # in place
    second = check()
    documents = torch.zeros(84, dtype=torch.int32)
    assert not torch.equal(check(), second)


def test_tables_of_a_block_mask_of_torch():
    """They are made once, and again where a field is another tensor, or was written to."""
    torch_flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = (tensor.detach() for tensor in tensors(rows=96, keys=96))
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    lists = torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32)
    mask = torch_flex.BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=48)

    def check(mask, *shown):
        out = flex_attention(q, k, v, block_mask=mask)
        blocks = torch.tensor(shown).bool()
        expected, _ = dense(q.double(), k.double(), v.double(), None, lambda b, h, i, j: blocks[i // 48, j // 48])
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)

    check(mask, [0, 1], [1, 1])
    made = torch_mask._tables(mask)[0]
    check(mask, [0, 1], [1, 1])
    assert torch_mask._tables(mask)[0] is made
    counts[0, 0, 1] = 1
    check(mask, [0, 1], [0, 1])
    mask.kv_indices = torch.zeros_like(lists)
    check(mask, [1, 0], [1, 0])
    mask.full_kv_num_blocks, mask.full_kv_indices = torch.tensor([[[0, 1]]]), torch.tensor([[[[0, 1], [1, 0]]]])
    check(mask, [1, 0], [1, 1])
    number = id(mask)
    del mask
    gc.collect()
    assert number not in torch_mask._kept
    with torch.inference_mode():
        unknown = torch_flex.BlockMask.from_kv_blocks(counts.clone(), lists.clone(), BLOCK_SIZE=48)
        assert torch_mask._tables(unknown)[0] is not torch_mask._tables(unknown)[0]
