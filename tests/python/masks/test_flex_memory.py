"""What a score_mod sees may change between two calls: it is then recorded again. Each test changes one thing."""

import functools

import pytest
import torch
from flash_attention import flex_attention
from flash_attention.flex.program import record

FACTORS = (1.5, 7.25)


class Settings:
    factor = FACTORS[0]


factor = FACTORS[0]


def of_a_global():
    def make(value):
        global factor
        factor = value
        return mod

    def mod(s, b, h, i, j):
        return s * factor

    return make


def of_a_class():
    def mod(s, b, h, i, j):
        return s * Settings.factor

    def make(value):
        Settings.factor = value
        return mod

    return make


def of_an_object():
    settings = Settings()

    def make(value):
        settings.factor = value
        return lambda s, b, h, i, j: s * settings.factor

    return make


def of_a_dictionary():
    settings = {}
    look_up = settings.get

    def make(value):
        settings["factor"] = value
        return lambda s, b, h, i, j: s * look_up("factor")

    return make


def of_a_keyword():
    def make(value):
        def mod(s, b, h, i, j, *, factor=value):
            return s * factor

        return mod

    return make


def of_a_default():
    return lambda value: lambda s, b, h, i, j, factor=value: s * factor


def of_the_function_itself():
    def mod(s, b, h, i, j):
        return s * mod.factor

    def make(value):
        mod.factor = value
        return mod

    return make


def of_a_partial():
    return lambda value: functools.partial(lambda s, b, h, i, j, factor: s * factor, factor=value)


def of_a_list():
    held = torch.zeros(1)

    def mod(s, b, h, i, j):
        return s * held.tolist()[0]

    def make(value):
        held.fill_(value)
        return mod

    return make


def of_an_array():
    held = torch.zeros(1)

    def mod(s, b, h, i, j):
        return s * float(held.numpy()[0])

    def make(value):
        held.fill_(value)
        return mod

    return make


def of_a_tensor_without_axes():
    held = torch.zeros(())

    def mod(s, b, h, i, j):
        return s * held

    def make(value):
        held.fill_(value)
        return mod

    return make


WAYS = [
    of_a_global, of_a_class, of_an_object, of_a_dictionary, of_a_keyword, of_a_default, of_the_function_itself,
    of_a_partial, of_a_list, of_an_array, of_a_tensor_without_axes,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_number(way):
    make = way()
    assert [record(make(value)).numbers for value in (*FACTORS, FACTORS[0])] == [[1.5], [7.25], [1.5]]


def test_which_tensor_is_which():
    def make(first, second):
        return lambda s, b, h, i, j: s + first[j] - second[j]

    tensors = [torch.ones(8) for _ in range(4)]
    record(make(*tensors[:2]))
    for pair in (tensors[2:], tensors[1::-1]):
        assert all(one is other for one, other in zip(record(make(*pair)).tensors, pair, strict=True))


def test_true_and_1():
    def make(value):
        return lambda s, b, h, i, j: s * 2 if value is True else s

    assert ["mul" in record(make(value)).text for value in (True, 1, True)] == [True, False, True]


def test_the_sign_of_zero():
    def make(value):
        return lambda s, b, h, i, j: s * value

    texts = [record(make(value)).text for value in (0.0, -0.0, 0.0)]
    assert texts[0] == texts[2] != texts[1] and "-0.0" in texts[1]


def test_which_of_two_functions_is_seen_again():
    def times(value):
        return lambda s: s * value

    def after(first, second, third):
        return lambda s, b, h, i, j: third(torch.tanh(second(torch.tanh(first(s)))))

    one, two = map(times, FACTORS)
    assert record(after(one, two, one)).numbers == [1.5, 7.25, 1.5]
    assert record(after(one, two, two)).numbers == [1.5, 7.25, 7.25]


def test_that_it_is_not_recorded_again():
    """Where nothing changed: the very same text."""

    def make():
        def mod(s, b, h, i, j, *, factor=2.5):
            return torch.maximum(s * factor, torch.zeros_like(s)) + abs(i - j) * len((1, 2))

        mod.label = "of two"
        return mod

    assert record(make()).text is record(make()).text


def test_a_shape_that_the_function_asks_for():
    def make(table):
        return lambda s, b, h, i, j: s + table[j % table.shape[0]] * len(table)

    assert [record(make(torch.ones(size))).numbers for size in (5, 7)] == [[5, 5.0], [7, 7.0]]


def test_a_shape_of_what_is_remembered():
    """shape is known without a look at what a tensor holds, so that the program of the first is found again."""

    def make(table):
        return lambda s, b, h, i, j: s + table[j % table.shape[0]]

    tables = [torch.ones(size) for size in (5, 7, 5)]
    first, other, again = (record(make(table)) for table in tables)
    assert [first.numbers, other.numbers, again.numbers] == [[5], [7], [5]]
    assert again.text is first.text and again.tensors[0] is tables[2]


def test_a_type_of_what_is_remembered():
    def make(table):
        return lambda s, b, h, i, j: s + table[j]

    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.int64, "int64")):
        assert f"t0 = tensor {name} 1" in record(make(torch.ones(8).to(dtype))).text


def test_whether_gradients_are_wanted():
    """Under no_grad nothing is detached, as nothing is differentiated; the same function may have gradients later."""

    def mod(s, b, h, i, j):
        with torch.no_grad():
            factor = torch.tanh(s)
        return s * factor

    q = torch.randn(1, 1, 8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.no_grad():
        flex_attention(q, q, q, mod)
    other = lambda s, b, h, i, j: s * torch.tanh(s).detach()  # noqa: E731
    got, want = (torch.autograd.grad(flex_attention(q, q, q, m).square().sum(), q)[0] for m in (mod, other))
    assert torch.equal(got, want)


def test_whether_a_tensor_wants_a_gradient():
    """Its derivatives are written down only then: at 0 the power has none that follows from exp and log."""

    def make(table):
        return lambda s, b, h, i, j: s + table[j].abs() ** 1.5

    table = torch.randn(16, generator=torch.Generator().manual_seed(0))
    table[3] = 0
    q = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    flex_attention(q, q, q, make(table))
    learned = table.clone().requires_grad_()
    (got,) = torch.autograd.grad(flex_attention(q, q, q, make(learned)).square().sum(), learned)
    scores = q @ q.mT / 4 + learned.abs() ** 1.5
    (want,) = torch.autograd.grad((torch.softmax(scores, -1) @ q).square().sum(), learned)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
