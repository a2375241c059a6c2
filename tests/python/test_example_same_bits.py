"""examples/same_bits.py: sampler and trainer have the same log-probabilities, to the bit; without the flag they do not."""

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZES = ("--rounds", "2", "--requests", "5", "--new-tokens", "24")


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    import same_bits

    yield same_bits
    sys.path.remove(str(EXAMPLES))


def test_all_are_equal(example, device, capsys):
    equal, count = example.main(["--device", device, *SIZES])
    said = capsys.readouterr().out
    assert equal == count > 100
    assert f"{equal} of {count} log-probabilities of sampler and trainer are equal" in said
    assert "blocks of 32 rows" in said  # what is not this library's is named


@pytest.mark.parametrize("way", ["--plain", "--plain-attention"])
def test_without_the_flag_they_differ(example, way, device, capsys):
    equal, count = example.main(["--device", device, "--dtype", "bfloat16", way, *SIZES])
    assert equal < count
    assert "invariant=False" in capsys.readouterr().out


def test_one_that_differs_is_an_error(example, device, monkeypatch):
    """The comparison can fail: a trainer whose attention is not the sampler's."""
    plain = example.attention_packed
    monkeypatch.setattr(example, "attention_packed", lambda *given, **options: plain(*given, **{**options, "scale": 0.17}))
    with pytest.raises(SystemExit, match="some differ"):
        example.main(["--device", device, *SIZES])


def test_rows_run_in_one_shape(example):
    shapes = []

    def double(rows):
        shapes.append(rows.shape)
        return 2 * rows

    rows = torch.randn(70, 3)
    assert torch.equal(example.in_blocks(double, rows), 2 * rows) and shapes == [(32, 3)] * 3
