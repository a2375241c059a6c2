"""examples/serve.py: requests that come and go over shared pages have the logits of a dense computation in float64."""

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def serve():
    path = Path(__file__).resolve().parents[3] / "examples" / "serve.py"
    spec = importlib.util.spec_from_file_location("serve", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype, page", [("float32", 16), ("bfloat16", 3)])
def test_served_logits_are_dense_ones(serve, dtype, page, device, capsys):
    sizes = ["--requests", "5", "--pages", str(360 // page), "--page-size", str(page), "--budget", "40"]
    server = serve.main(["--check", "--device", device, "--dtype", dtype, *sizes])
    assert "5 requests" in capsys.readouterr().out
    assert sorted(server.free) == list(range(360 // page)) and server.reserved == 0


def test_requests_join_wait_for_pages_and_leave(serve, device):
    torch.manual_seed(1)
    model = serve.Model().to(device)
    server = serve.Server(model, pages=10, page_size=8, budget=24, device=device, dtype=torch.float32)
    sizes = ((40, 6, 0), (5, 9, 1), (3, 4, 1), (60, 3, 2), (1, 12, 9))  # prompt, new tokens, arrival
    requests = [serve.Request(torch.randint(256, (prompt,)).tolist(), new, at) for prompt, new, at in sizes]
    for request in requests:
        server.submit(request)
    together, waits = set(), False
    while server.waiting or server.running:
        server.step()
        together.add(len(server.running))
        waits = waits or any(request.arrives < server.steps for request in server.waiting)
        held = [page for request in server.running for page in request.pages]
        assert len(set(held)) == len(held) and sorted(held + server.free) == list(range(10))
    assert max(together) >= 3 and waits
    assert all(request.finished() for request in requests)
    assert serve.worst_error(model, requests) < 1e-5


def test_a_page_of_another_request_is_found_out(serve):
    """The check of the test above sees a wrong page: pages are exchanged between two requests."""
    torch.manual_seed(2)
    model = serve.Model()
    server = serve.Server(model, pages=20, page_size=8, budget=200, device="cpu", dtype=torch.float32)
    requests = [serve.Request(torch.randint(256, (30,)).tolist(), 5, 0) for _ in range(2)]
    for request in requests:
        server.submit(request)
    server.step()
    requests[0].pages[1], requests[1].pages[1] = requests[1].pages[1], requests[0].pages[1]
    server.run()
    assert serve.worst_error(model, requests) > 1e-3


@pytest.mark.parametrize("flag", ["--requests", "--pages", "--page-size", "--budget"])
def test_sizes_are_positive(serve, flag, capsys):
    with pytest.raises(SystemExit):
        serve.main([flag, "0"])
    assert f"argument {flag}: got 0; allowed are 1 and more" in capsys.readouterr().err


def test_a_request_that_never_fits_is_refused(serve):
    server = serve.Server(serve.Model(), pages=2, page_size=8, budget=8, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="request: needs 3 pages; the cache has 2"):
        server.submit(serve.Request([1] * 20, 1, 0))
