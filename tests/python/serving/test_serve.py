"""examples/serve.py: requests that come and go over shared pages have the logits of a dense computation in float64, and the
server around them loses nothing when clients leave."""

import http.client
import importlib
import json
import math
import random
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def serve():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("serve")
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def parts(serve):
    """The modules of the engine."""
    return importlib.import_module("serving.engine"), importlib.import_module("serving.pages")


def small(serve, device="cpu", pages=10, page_size=8, budget=24):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rope_theta": 1e4}
    model = serve.Model(serve.Config(**sizes, rms_norm_eps=1e-5, vocab_size=257)).to(device)
    return serve.Engine(model, pages, page_size, budget)


def kept(serve, prompt, new_tokens, **more):
    """A request that keeps its logits and is never at its end by chance."""
    request = serve.Request(prompt, new_tokens, **more)
    request.logits = []
    return request


def tokens(count):
    return torch.randint(256, (count,)).tolist()


def check_pages(engine):
    """Each page is free, or remembered without owner, or has as many owners as requests hold it."""
    pages = engine.pages
    held = [page for request in engine.running for page in request.pages]
    assert [held.count(page) for page in range(pages.count)] == pages.owners
    assert sorted([*pages.free, *pages.idle, *set(held)]) == list(range(pages.count))
    assert 0 <= pages.promised <= len(pages.free) + len(pages.idle)
    for request in engine.running:
        assert len(set(request.pages)) == len(request.pages)


@pytest.mark.parametrize("dtype, page", [("float32", 16), ("bfloat16", 3)])
def test_served_logits_are_dense_ones(serve, dtype, page, device, capsys):
    sizes = ["--requests", "6", "--pages", str(480 // page), "--page-size", str(page), "--budget", "40"]
    engine = serve.main(["--check", "--device", device, "--dtype", dtype, *sizes])
    assert "6 requests" in capsys.readouterr().out
    assert engine.pages.used() == 0 and engine.cached_tokens > 0


def test_requests_join_wait_for_pages_and_leave(serve, device):
    torch.manual_seed(1)
    engine = small(serve, device)
    sizes = ((40, 6, 0), (5, 9, 1), (3, 4, 1), (60, 3, 2), (1, 12, 9))  # prompt, new tokens, arrival
    requests = [kept(serve, tokens(prompt), new) for prompt, new, _ in sizes]
    together, waits = set(), False
    for turn in range(60):
        for request, (_, _, arrives) in zip(requests, sizes, strict=True):
            if arrives == turn:
                engine.submit(request)
        engine.step()
        check_pages(engine)
        together.add(len(engine.running))
        waits = waits or bool(engine.waiting)
    assert max(together) >= 3 and waits
    assert all(request.reason() for request in requests) and engine.pages.promised == 0
    assert serve.worst_error(engine.model, requests) < 1e-5


def test_a_page_of_another_request_is_found_out(serve):
    """The check of the test above sees a wrong page: pages are exchanged between two requests."""
    torch.manual_seed(2)
    engine = small(serve, pages=20, budget=200)
    requests = [kept(serve, tokens(30), 5) for _ in range(2)]
    for request in requests:
        engine.submit(request)
    engine.step()
    requests[0].pages[1], requests[1].pages[1] = requests[1].pages[1], requests[0].pages[1]
    for _ in range(5):
        engine.step()
    assert serve.worst_error(engine.model, requests) > 1e-3


def test_the_same_beginning_is_read_once(serve, device):
    """Logits behind pages of another request are dense ones; a remembered page goes when room is needed, and only then."""
    torch.manual_seed(3)
    engine = small(serve, device)
    beginning = tokens(24)
    first = kept(serve, [*beginning, *tokens(5)], 3)
    others = [kept(serve, [*beginning, *tokens(count)], 4) for count in (1, 9)]
    whole = kept(serve, beginning, 2)  # its last token is read again: its logits are wanted
    engine.submit(first)
    for _ in range(4):
        engine.step()
    for request in (*others, whole):
        engine.submit(request)
    for _ in range(8):
        engine.step()
        check_pages(engine)
    assert [request.cached for request in (first, *others, whole)] == [0, 24, 24, 16]
    assert serve.worst_error(engine.model, [first, *others, whole]) < 1e-5
    long = kept(serve, tokens(70), 10)  # takes every page
    again = kept(serve, [*beginning, *tokens(2)], 2)
    for request in (long, again):
        engine.submit(request)
        while engine.waiting or engine.running:
            engine.step()
            check_pages(engine)
    assert again.cached == 0 and serve.worst_error(engine.model, [long, again]) < 1e-5


def test_remembered_pages_hold_what_is_looked_for(parts):
    """Random lives of requests over few pages; a model of the cache knows what each page holds."""
    rng, (_, pages_module) = random.Random(5), parts
    pages, holds, living, hits = pages_module.Pages(12, 4), {}, [], 0
    for _ in range(4000):
        if living and rng.random() < 0.5:
            text, most, mine = living.pop(rng.randrange(len(living)))
            filled = rng.randint(len(mine) * 4, most) if rng.random() < 0.9 else len(mine) * 4
            while len(mine) * 4 < filled:
                mine.append(pages.take())
                holds[mine[-1]] = None
            for index in range(filled // 4):
                if holds[mine[index]] is None:
                    holds[mine[index]] = text[: index * 4 + 4]
                    pages.remember(mine[index - 1] if index else None, mine[index], text[index * 4 : index * 4 + 4])
            pages.end(mine, most)
        else:
            most = rng.randint(2, 20)
            text = [rng.randint(0, 1) for _ in range(most)]
            shared = pages.begin(text[: most - 1], most)
            if shared is not None:
                assert [holds[page] for page in shared] == [text[: end * 4 + 4] for end in range(len(shared))]
                assert len(shared) * 4 < most - 1
                hits += len(shared)
                living.append((text, most, shared))
        held = [page for _, _, mine in living for page in mine]
        assert [held.count(page) for page in range(12)] == pages.owners
        assert sorted([*pages.free, *pages.idle, *set(held)]) == list(range(12))
        assert 0 <= pages.promised <= len(pages.free) + len(pages.idle)
    assert hits > 200


def test_who_leaves_gives_everything_back(serve):
    """While waiting, in the middle of the prompt, and between tokens; who stays has the logits of a dense computation."""
    torch.manual_seed(4)
    engine = small(serve)
    told = []
    leaving = [kept(serve, tokens(40), 16, tell=lambda *of: told.append(of)), kept(serve, tokens(30), 3)]
    stays = kept(serve, tokens(9), 12)
    for request in (leaving[0], stays, leaving[1]):
        engine.submit(request)
    engine.step()
    assert engine.waiting == [leaving[1]] and 0 < leaving[0].done < 40
    leaving[1].left = True
    for _ in range(3):
        engine.step()
    assert leaving[1] not in engine.waiting
    leaving[0].left = True
    for _ in range(14):
        engine.step()
        check_pages(engine)
    assert told[-1] == ([], "left") and stays.reason() == "length" and engine.pages.used() == engine.pages.promised == 0
    assert serve.worst_error(engine.model, [stays]) < 1e-5


def test_tokens_are_drawn_as_their_probabilities_say(serve, parts):
    """A draw is a function of the request's seed; what top_p leaves out never comes."""
    engine, _ = parts
    logits = torch.tensor([2.0, 0.5, 1.0, -1.0, 0.0])
    for temperature, top_p, allowed in ((1.0, 1.0, 5), (0.7, 0.8, 2), (2.0, 0.9, 4)):
        exact = (logits.double() / temperature).softmax(-1)
        ordered = exact.sort(descending=True)
        assert int((ordered.values.cumsum(0) < top_p).sum()) + 1 == allowed or top_p == 1.0
        exact[ordered.indices[allowed:]] = 0
        exact /= exact.sum()
        requests = [serve.Request([1], 1, temperature, top_p, seed) for seed in range(4000)]
        drawn = torch.tensor(engine.sampled(logits.expand(4000, 5), requests))
        counts = torch.bincount(drawn, minlength=5).double()
        assert (counts[exact == 0] == 0).all()
        expected = 4000 * exact[exact > 0]
        distance = ((counts[exact > 0] - expected) ** 2 / expected).sum().item()
        assert distance < 4 * allowed + 10  # chi squared with allowed - 1 degrees of freedom
    alone = engine.sampled(logits[None], [serve.Request([1], 1, 1.0, 1.0, 7)])
    many = engine.sampled(
        logits.expand(3, 5), [serve.Request([1], 1, *of) for of in ((0, 1, 1), (1.0, 1.0, 7), (2, 0.5, 3))]
    )
    assert many[1] == alone[0] and many[0] == 0


def test_an_end_of_the_text_ends_the_request(serve):
    engine = small(serve)
    with torch.no_grad():
        engine.model.head.weight.zero_()
        engine.model.norm.weight.zero_()
    reasons = []
    request = serve.Request([1, 2], 50, temperature=1.0, seed=1, tell=lambda new, reason: reasons.append(reason))
    engine.submit(request)
    while engine.running or engine.waiting:
        engine.step()
    if request.tokens[-1] == serve.END:
        assert reasons[-1] == "stop"
    else:
        assert reasons[-1] == "length" and len(request.tokens) == 52
    ends = serve.Request([1, 2], 50, tell=lambda new, reason: reasons.append(reason))
    engine.submit(ends)
    engine.step()
    ends.tokens[-1] = serve.END  # as if it had been drawn
    assert ends.reason() == "stop"


@pytest.fixture
def server(serve):
    pytest.importorskip("starlette", reason="examples/serving/requirements.txt is not installed")
    pytest.importorskip("uvicorn", reason="examples/serving/requirements.txt is not installed")
    engine = small(serve, pages=60, budget=64)
    with serve.serving(engine) as address:
        yield engine, address


def asked(address, body, path="/v1/completions"):
    """(status, answer) of one request."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, body if isinstance(body, str) else json.dumps(body))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_answers_have_the_shape_of_openais(server):
    _, address = server
    body = {"prompt": "hello there, hello there", "max_tokens": 7, "temperature": 0}
    status, text = asked(address, body)
    found = json.loads(text)
    assert (
        status == 200
        and found["object"] == "text_completion"
        and found["choices"][0]["finish_reason"] in ("length", "stop")
    )
    usage = found["usage"]
    assert usage["prompt_tokens"] == 24 and usage["total_tokens"] == 24 + usage["completion_tokens"]
    status, text = asked(address, {**body, "stream": True})
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200 and events[-1] == "[DONE]"
    events = [json.loads(event) for event in events[:-1]]
    streamed = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    assert streamed == found["choices"][0]["text"]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 16  # two pages of eight
    assert json.loads(asked(address, None, "/v1/models")[1])["data"][0]["object"] == "model"


@pytest.mark.parametrize(
    "body, message",
    [
        ({"max_tokens": 3}, "prompt: expected"),
        ({"prompt": [1, 257]}, "prompt: expected"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: got 0"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens: got true"),
        ({"prompt": "a", "temperature": -1}, "temperature: got -1"),
        ({"prompt": "a", "n": 2}, "n: only 1 is served"),
        ({"prompt": "a", "logit_bias": {}}, "logit_bias: not served"),
        ({"prompt": "a", "max_tokens": 4000}, "allowed are 1 to 480"),
        ([], "no JSON object"),
        ("{", "Expecting"),
    ],
)
def test_what_is_no_request_is_refused(server, body, message):
    _, address = server
    status, text = asked(address, body)
    assert status == 400 and message in json.loads(text)["error"]["message"]


def test_too_many_requests_are_refused(server, serve, parts):
    engine, _ = server
    worker = parts[0].Worker(engine, most_waiting=2)  # never started: nobody takes from its inbox
    assert [worker.submit(serve.Request([1], 1)) for _ in range(3)] == [True, True, False]


def test_a_step_that_fails_ends_its_requests_alone(server, monkeypatch):
    engine, address = server
    forward = type(engine)._forward
    broken = threading.Event()

    def once(self, chosen):
        if not broken.is_set():
            broken.set()
            raise RuntimeError("a step fails, as this test wants it")
        return forward(self, chosen)

    monkeypatch.setattr(type(engine), "_forward", once)
    assert asked(address, {"prompt": "abc"})[0] == 500
    assert asked(address, {"prompt": "abc"})[0] == 200
    assert engine.pages.used() == engine.pages.promised == 0


def test_a_load_with_clients_that_leave(server):
    engine, address = server
    load = importlib.import_module("serving.load").load
    outcome = load(address, 48, clients=12, most_tokens=12)
    assert outcome.problems == [] and outcome["wrong"] == 0
    assert outcome["complete"] + outcome["left"] == 48 and outcome["left"] >= 4 and outcome["cached"] > 0
    health = outcome.health
    assert (health["running"], health["waiting"], health["pages_used"], health["alive"]) == (0, 0, 0, True)
    check_pages(engine)
    assert engine.pages.promised == 0 and not math.isnan(outcome.seconds)
