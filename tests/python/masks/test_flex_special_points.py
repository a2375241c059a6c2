"""Values and derivatives of every operation at special points: those of torch."""

import ctypes
import dataclasses

import c_interface
import pytest
import torch
from flash_attention import create_block_mask, flex_attention
from flash_attention.arguments.options import make_options
from flash_attention.flex import arrays, attention, operations
from flash_attention.flex.nodes import Node, Nodes
from flash_attention.flex.program import Program, record
from flash_attention.options import Tensors
from flex_points import ARRAYS, CASES, WITHOUT_POINTS, all_cases, torchs


def test_every_operation_has_points():
    """A new operation is added to flex_points.py with its special points."""
    names = {name.removeprefix("aten::") for name in operations.TABLE}
    assert names == set(CASES) | WITHOUT_POINTS
    assert set(arrays._FOLDS) <= set(ARRAYS)


def program_of(case, values):
    """The text that shows a row where the value is torch's, and gives every row a score of 0 with the derivative of the
    value; and what it captures. Rows are points."""
    columns = [torch.tensor([point[n] for point in case.points]) for n in range(len(case.points[0]))]
    columns = [column.int() if column.dtype == torch.int64 else column for column in columns]
    wanted = torch.stack(values)
    wanted = wanted if wanted.dtype == torch.bool else wanted.int() if not wanted.is_floating_point() else wanted

    def right(b, h, i, j):
        got, want = case.function(*(column[i] for column in columns)), wanted[i]
        if not wanted.is_floating_point():
            return got == want
        return (got == want) | ((got != got) & (want != want)) | ((got - want).abs() <= case.near * want.abs() + 1e-7)

    return columns, right


def attended(program, queries, rows):
    """(out, dq) of rows with a score of 0, each of which sees one key; the gradient of lse is 1."""
    q = torch.zeros(1, queries, rows, 8)
    q[..., 0] = 1
    q.requires_grad_()
    k = torch.zeros(1, queries, 1, 8)
    k[..., 0] = 1
    v = torch.ones(1, queries, 1, 8)
    options = make_options(alignment="top_left", layout="bhsd", scale=1.0)
    out, lse = attention._attend(program, Tensors(q, k, v), options, 0, 0, True, None)
    seen = lse > -torch.inf
    (dq,) = torch.autograd.grad(lse[seen].sum(), q)
    return out[..., 0].detach(), dq[..., 0]


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_values(case):
    values, _ = torchs(case)
    _, right = program_of(case, values)
    out, _ = attended(record(None, right), 1, len(case.points))
    wrong = [(point, value.item()) for point, value, seen in zip(case.points, values, out[0, 0], strict=True) if seen != 1]
    assert not wrong, f"not torch's {wrong}"


def slopes_text(case, which):
    """The program whose score is 0 and has the derivative of the case by argument `which`."""
    columns, _ = program_of(case, torchs(case)[0])

    def score_mod(s, b, h, i, j):
        args = [column[i] for column in columns]
        args[which] = args[which] - (s.detach() - s)  # itself, -0 as well
        return case.function(*args)

    return with_score_of_0(record(score_mod))


def with_score_of_0(program):
    """The program with the same derivative of the score."""
    zero = Node("zero", "slope", ("0.0", program.nodes.results["score"], "1.0"))
    return Program(Nodes([*program.nodes.nodes, zero], {"score": "zero"}), program.tensors, program.numbers)


def is_near(got, want, near, least=1e-6):
    return got == want or (got != got and want != want) or abs(got - want) <= near * abs(want) + least


GRADED = [
    pytest.param(case, n, id=f"{case.name} by {'xy'[n]}")
    for case in all_cases()
    for n in range(len(case.points[0]))
    if case.graded and isinstance(case.points[0][0], float) and torchs(case)[0][0].is_floating_point()
]


@pytest.mark.parametrize(("case", "which"), GRADED)
def test_derivatives(case, which):
    _, slopes = torchs(case)
    _, got = attended(slopes_text(case, which), 1, len(case.points))
    wrong = [
        (point, f"got {one} want {want[which]}")
        for point, one, want in zip(case.points, got[0, 0].tolist(), slopes, strict=True)
        if not is_near(one, want[which], case.near)
    ]
    assert not wrong, f"not torch's {wrong}"


@pytest.mark.parametrize("by_mask", [True, False])
def test_a_slope_that_is_not_finite_spoils_no_hidden_pair(by_mask):
    """rsqrt of 0 on the diagonal, which nobody sees."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 12, 8, generator=generator).requires_grad_() for _ in range(3))
    table = torch.rand(12, 12, generator=generator).fill_diagonal_(0).requires_grad_()

    def score_mod(s, b, h, i, j):
        s = s * torch.rsqrt(table[i, j]) + torch.log(table[i, j])
        return s if by_mask else torch.where(i == j, -torch.inf, s)

    mask = create_block_mask(lambda b, h, i, j: i != j) if by_mask else None
    got = torch.autograd.grad(flex_attention(q, k, v, score_mod, mask).square().sum(), (q, k, v, table))
    seen = ~torch.eye(12, dtype=torch.bool)
    rest = torch.where(seen, table, 1.0)
    scores = (q @ k.mT / 8**0.5) * torch.rsqrt(rest) + torch.log(rest)
    out = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v
    for one, other in zip(got, torch.autograd.grad(out.square().sum(), (q, k, v, table)), strict=True):
        assert (one - other).abs().max() <= 3e-5 * other.abs().max()


# The same in emitted CUDA, in the emulator: many cases in one program, one for each head.
LIBRARY = c_interface.ROOT / "build/release/libflash_attention.so"
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="build/release is not built")
CASES_AT_ONCE = 24


def columns_of(cases):
    """[heads, rows] of each argument; short ones are filled up with their first point."""
    rows = max(len(case.points) for case in cases)
    filled = [case.points + [case.points[0]] * (rows - len(case.points)) for case in cases]
    columns = [torch.tensor([[point[n] for point in points] for points in filled]) for n in range(len(filled[0][0]))]
    return [column.int() if column.dtype == torch.int64 else column for column in columns], filled


def chosen(results, h):
    """The result of the head's case. Each is recorded, in the order of the heads."""
    found = results[0]
    for n, result in enumerate(results[1:], 1):
        found = torch.where(h == n, result, found)
    return found


def emulated(program, heads, rows):
    """(out, dq) as attended() gives them, of emulated GPU kernels."""
    q, k, v = (torch.zeros(1, size, heads, 8) for size in (rows, 1, 1))
    q[..., 0], k[..., 0], v[:] = 1, 1, 1
    out, lse, dq, dlse = torch.zeros_like(q), torch.zeros(1, heads, rows), torch.zeros_like(q), torch.ones(1, heads, rows)
    dk, dv, dout = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(q)
    emulator = c_interface.Emulator(LIBRARY)
    problem = emulator.made(
        "problem", batch=1, seq_q=rows, seq_kv=1, heads_q=heads, heads_kv=heads, head_dim=8, head_dim_v=8, dtype=0,
        scale=1.0, program=program.text.encode(),
    )  # fmt: skip
    tensors = (ctypes.c_void_p * 8)(*(tensor.data_ptr() for tensor in program.tensors))
    for n, tensor in enumerate(program.tensors):
        problem.program_sizes[n][:] = [*tensor.shape, *[0] * (4 - tensor.dim())]
    scalars = (ctypes.c_double * 16)(*program.numbers)
    buffers = emulator.made(
        "buffers", q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse, dq=dq, dk=dk, dv=dv,
        program_tensors=ctypes.addressof(tensors), program_scalars=ctypes.addressof(scalars),
    )  # fmt: skip
    emulator.run("forward", problem, buffers, "forward/portable")
    if program.has_score:
        emulator.run("backward", problem, buffers, "backward/portable")
    return out[0, ..., 0].T, dq[0, ..., 0].T


def in_parts(cases):
    return [cases[n : n + CASES_AT_ONCE] for n in range(0, len(cases), CASES_AT_ONCE)]


def of_kind(kind, num_args):
    of = {"float": float, "int": int, "bool": bool}[kind]
    return [case for case in all_cases() if type(case.points[0][0]) is of and len(case.points[0]) == num_args]


VALUES = [part for kind in ("float", "int", "bool") for n in (1, 2) for part in in_parts(of_kind(kind, n))]
SLOPES = [
    (part, which)
    for n in (1, 2)
    for which in range(n)
    for part in in_parts(
        [param.values[0] for param in GRADED if param.values[1] == which and len(param.values[0].points[0]) == n]
    )
]
GPU_NEAR = 4  # times: instructions of GPUs for exp, log, sin are less exact


@needs_library
@pytest.mark.parametrize("cases", VALUES, ids=lambda cases: f"{cases[0].name} to {cases[-1].name}")
def test_values_in_emitted_cuda(cases):
    columns, filled = columns_of(cases)
    values = [torchs(dataclasses.replace(case, points=points))[0] for case, points in zip(cases, filled, strict=True)]
    wanted = torch.tensor([[float(value) for value in row] for row in values])

    def right(b, h, i, j):
        results, want = [], wanted[h, i]
        for case in cases:
            got = case.function(*(column[h, i] for column in columns)).float()
            near = GPU_NEAR * case.near * want.abs() + GPU_NEAR * 3e-7
            results.append((got == want) | ((got != got) & (want != want)) | ((got - want).abs() <= near))
        return chosen(results, h)

    out, _ = emulated(record(None, right), len(cases), wanted.shape[1])
    wrong = [
        (case.name, point, value.item(), "seen", seen)
        for case, points, row, seens in zip(cases, filled, values, out.tolist(), strict=True)
        for point, value, seen in zip(points, row, seens, strict=True)
        if seen != 1
    ]
    assert not wrong, f"not torch's {wrong}"


@needs_library
@pytest.mark.parametrize(
    ("cases", "which"), SLOPES, ids=lambda x: "xy"[x] if isinstance(x, int) else f"{x[0].name} to {x[-1].name}"
)
def test_derivatives_in_emitted_cuda(cases, which):
    columns, filled = columns_of(cases)

    def score_mod(s, b, h, i, j):
        args = [column[h, i] for column in columns]
        args[which] = args[which] - (s.detach() - s)
        return chosen([case.function(*args) for case in cases], h)

    _, got = emulated(with_score_of_0(record(score_mod)), len(cases), len(filled[0]))
    wrong = []
    for case, points, row in zip(cases, filled, got.tolist(), strict=True):
        slopes = torchs(dataclasses.replace(case, points=points))[1]
        wrong += [
            (case.name, point, f"got {one} want {want[which]}")
            for point, one, want in zip(points, row, slopes, strict=True)
            if not is_near(one, want[which], GPU_NEAR * case.near, 4e-6)
        ]
    assert not wrong, f"not torch's {wrong}"
