"""A small server of a language model: continuous batching over pages, prefix caching, chunked prefill, sampling, streaming.

pip install -r examples/serving/requirements.txt
python examples/serve.py --port 8000                   # HTTP in the shape of OpenAI's completions, on loopback
python examples/serve.py --check                       # no HTTP: all logits against a dense computation in float64
python examples/serve.py --load 200                    # no port of yours: 200 requests over loopback, some clients leave

curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 16, "stream": true}'

To be read in this order: serving/model.py, serving/pages.py, serving/engine.py, then this file, and serving/load.py. The
model has random weights and speaks in bytes; serving/config.json has its sizes.
"""

import argparse
import asyncio
import codecs
import contextlib
import functools
import itertools
import json
import sys
import threading
import time
from pathlib import Path

import torch
from serving.engine import Engine, Request, Worker, progress_line
from serving.model import END, Config, Model, dense_logits

NAME = "random-bytes"
# What the request's body may have: the type, the least and the largest value, and what is meant without it.
FIELDS = {
    "max_tokens": (int, 1, 1 << 20, 16),
    "temperature": ((int, float), 0, 100, 1.0),
    "top_p": ((int, float), 0, 1, 1.0),
    "seed": (int, -(1 << 63), (1 << 63) - 1, None),
    "stream": (bool, False, True, False),
}
# Fields that ask for the only thing that there is.
ONLY = {"model": NAME, "n": 1, "echo": False, "logprobs": None, "stop": None, "suffix": None, "user": None}


def read(body):
    """(prompt as tokens, fields) of a request's body; a ValueError says what is wrong."""
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    prompt = body.pop("prompt", None)
    if isinstance(prompt, str):
        prompt = list(prompt.encode())
    if not (isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token <= END for token in prompt)):
        raise ValueError(f"prompt: expected a string, or a list of tokens from 0 to {END}, with one entry at least")
    for name, only in ONLY.items():
        if name != "user" and body.pop(name, only) != only:
            raise ValueError(f"{name}: only {json.dumps(only)} is served")
    body.pop("user", None)
    fields = {}
    for name, (kind, low, high, default) in FIELDS.items():
        value = fields[name] = body.pop(name, default)
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if value is not default and not (right and low <= value <= high):
            raise ValueError(f"{name}: got {json.dumps(value)}; allowed are {json.dumps(low)} to {json.dumps(high)}")
    if body:
        raise ValueError(f"{', '.join(body)}: not served")
    return prompt, fields


class Completions:
    """POST /v1/completions: a request for the worker, whose tokens come back to the event loop."""

    def __init__(self, worker):
        self.worker, self.numbers = worker, itertools.count(1)

    async def answer(self, http):
        from starlette.responses import JSONResponse, StreamingResponse

        def refusal(message, status, kind):
            return JSONResponse({"error": {"message": message, "type": kind}}, status)

        try:
            prompt, fields = read(json.loads(await http.body()))
            stream, new_tokens = fields.pop("stream"), fields.pop("max_tokens")
            loop, told = asyncio.get_running_loop(), asyncio.Queue()

            def tell(tokens, reason):
                with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
                    loop.call_soon_threadsafe(told.put_nowait, (tokens, reason))

            request = Request(prompt, new_tokens, tell=tell, **fields)
            if not self.worker.submit(request):
                return refusal("too many requests wait", 429, "rate_limit_error")
        except ValueError as error:
            return refusal(str(error), 400, "invalid_request_error")
        pieces = self._pieces(request, told)
        head = {"id": f"cmpl-{next(self.numbers)}", "object": "text_completion", "created": int(time.time()), "model": NAME}
        if stream:
            return StreamingResponse(self._events(request, pieces, head), media_type="text/event-stream")
        gone = asyncio.create_task(self._leave_with(http, request))
        try:
            text = [piece async for piece in pieces]
        finally:
            gone.cancel()
        if text[-1][1] == "error":
            return refusal("the step failed", 500, "server_error")
        choice = choice_of("".join(piece for piece, _ in text), text[-1][1])
        return JSONResponse({**head, "choices": [choice], "usage": usage_of(request)})

    async def _pieces(self, request, told):
        """(text, reason or None), until there is a reason. Who stops listening leaves the request."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        try:
            reason = None
            while reason is None:
                tokens, reason = await told.get()
                yield decoder.decode(bytes(token for token in tokens if token != END), final=reason is not None), reason
        finally:
            if reason is None:
                self.worker.leave(request)

    async def _events(self, request, pieces, head):
        async with contextlib.aclosing(pieces):
            async for text, reason in pieces:
                if text or reason:
                    yield f"data: {json.dumps({**head, 'choices': [choice_of(text, reason)]})}\n\n"
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage_of(request)})}\n\ndata: [DONE]\n\n"

    async def _leave_with(self, http, request):
        """A client that waits for the whole answer may go away as well."""
        while not await http.is_disconnected():
            await asyncio.sleep(0.05)
        self.worker.leave(request)


def choice_of(text, reason):
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def usage_of(request):
    new = len(request.tokens) - request.prompt
    details = {"cached_tokens": request.cached}
    return {
        "prompt_tokens": request.prompt,
        "completion_tokens": new,
        "total_tokens": len(request.tokens),
        "prompt_tokens_details": details,
    }


def application(worker):
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def models(http):
        return JSONResponse({"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "nobody"}]})

    async def health(http):
        engine = worker.engine
        counts = {name: getattr(engine, name) for name in ("new_tokens", "read_tokens", "cached_tokens", "steps")}
        state = {"running": len(engine.running), "waiting": len(engine.waiting), "pages_used": engine.pages.used()}
        return JSONResponse({**state, **counts, "alive": worker.is_alive()})

    return Starlette(
        routes=[
            Route("/v1/completions", Completions(worker).answer, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


@contextlib.contextmanager
def serving(engine, host="127.0.0.1", port=0, progress=None):
    """The server in threads of its own, on a free port if none is given; its address."""
    import uvicorn

    worker = Worker(engine, progress)
    worker.start()
    server = uvicorn.Server(uvicorn.Config(application(worker), host, port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise SystemExit(f"no server on {host}:{port}")
            time.sleep(0.01)
        yield "http://{}:{}".format(*server.servers[0].sockets[0].getsockname())
    finally:
        server.should_exit = True
        thread.join()
        worker.stop()


def check(engine, count, dtype):
    """Requests that come one after the other, half of them with a beginning that others have, against dense logits."""
    beginning = torch.randint(END, (100,)).tolist()
    requests = []
    for index in range(count):
        prompt, new_tokens = int(torch.randint(1, 150, ())), int(torch.randint(1, 40, ()))
        tokens = [*(beginning if index % 2 else []), *torch.randint(END, (prompt,)).tolist()]
        requests.append(Request(tokens, new_tokens))
        requests[-1].logits = []
    begin, coming = time.perf_counter(), list(requests)
    for turn in itertools.count():
        if coming and turn % 2 == 0:
            engine.submit(coming.pop(0))
        engine.step()
        if not (coming or engine.waiting or engine.running):
            break
    seconds = time.perf_counter() - begin
    speed = engine.new_tokens / seconds
    print(
        f"{count} requests, {engine.new_tokens} new tokens in {engine.steps} steps, {speed:.0f} tokens/s; "
        f"{engine.cached_tokens} tokens of prompts were not read again"
    )
    worst, allowed = worst_error(engine.model, requests), {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
    print(f"logits differ from dense ones in float64 by at most {worst:.1e} of the largest; allowed is {allowed}")
    if worst > allowed:
        raise SystemExit(1)


def worst_error(model, requests):
    """The largest difference between logits as served and dense ones, as part of the largest logit."""
    worst = 0.0
    for request in requests:
        logits = dense_logits(model, request.tokens)[request.prompt - 1 : -1]
        difference = torch.stack(request.logits).double().cpu() - logits
        worst = max(worst, (difference.abs().max() / logits.abs().max()).item())
    return worst


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}; allowed are 1 and more")
    return number


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=Path(__file__).with_name("serving") / "config.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--pages", type=positive, default=512)
    parser.add_argument("--page-size", type=positive, default=16)
    parser.add_argument("--budget", type=positive, default=128, help="tokens of a step")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=positive, default=8000)
    parser.add_argument("--requests", type=positive, default=12, help="of --check")
    parser.add_argument("--check", action="store_true", help="compare with a dense computation in float64, without HTTP")
    parser.add_argument("--load", type=positive, metavar="N", help="send N requests to a server on a free port, then end")
    parser.add_argument("--clients", type=positive, default=16, help="of --load, at a time")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Model(Config.read(options.config)).to(options.device, getattr(torch, options.dtype))
    engine = Engine(model, options.pages, options.page_size, options.budget)
    if options.check:
        check(engine, options.requests, options.dtype)
        return engine

    def progress(engine, speed):
        end, begin = ("", "\r\033[K") if sys.stderr.isatty() else ("\n", "")
        print(f"{begin}{progress_line(engine, speed)}", end=end, file=sys.stderr, flush=True)

    run = functools.partial(serving, engine, options.host, progress=progress)
    if options.load:
        from serving.load import load

        with run() as address:
            print(load(address, options.load, options.clients))
        return engine
    with run(port=options.port) as address:
        print(f"{address}/v1/completions", file=sys.stderr)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return engine


if __name__ == "__main__":
    main()
