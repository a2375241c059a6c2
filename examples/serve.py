"""Serves several requests at once: a small Llama-like model with random weights, its keys and values in pages.

python examples/serve.py --check                       # on the CPU; all logits against a dense computation in float64
python examples/serve.py --device cuda --requests 64 --dtype bfloat16

Each step takes one token of every running request and chunks of prompts that are not read yet, end to end, through the
model (continuous batching, chunked prefill). A layer makes one call: it turns new keys, writes them to pages, attends.
"""

import argparse
import time

import torch
from flash_attention.flash_attn_3 import flash_attn_with_kvcache
from torch import nn

VOCABULARY, WIDTH, LAYERS, HEADS, HEADS_KV, HEAD_DIM = 256, 128, 2, 8, 2, 32
ANGLES = torch.outer(
    torch.arange(4096.0), 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
)  # rotary, [positions, pairs]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, attend):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        x = x + self.out(attend(*heads.split([HEADS, HEADS_KV, HEADS_KV], dim=-2)).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, attend):
        """Logits of tokens [total]; attend(layer, q, k, v) -> [total, HEADS, HEAD_DIM] knows the keys of before."""
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, lambda q, k, v, index=index: attend(index, q, k, v))
        return self.head(self.norm(x))


class Request:
    def __init__(self, prompt, new_tokens, arrives):
        self.tokens, self.prompt, self.new_tokens, self.arrives = list(prompt), len(prompt), new_tokens, arrives
        self.done = 0  # tokens whose keys are in the cache
        self.pages, self.logits = [], []

    def finished(self):
        return len(self.tokens) == self.prompt + self.new_tokens


class Server:
    """Requests wait until the cache has pages for all of their life, and give them back at their end."""

    def __init__(self, model, pages, page_size, budget, device, dtype):
        self.model, self.page_size, self.budget, self.device = model, page_size, budget, device
        shape = (LAYERS, pages, page_size, HEADS_KV, HEAD_DIM)
        self.k, self.v = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.cos, self.sin = ANGLES.cos().to(device, dtype), ANGLES.sin().to(device, dtype)
        self.free, self.reserved = list(range(pages)), 0
        self.waiting, self.running, self.steps = [], [], 0

    def submit(self, request):
        if self.pages_of(request) > self.k.shape[1]:
            raise ValueError(f"request: needs {self.pages_of(request)} pages; the cache has {self.k.shape[1]}")
        self.waiting.append(request)

    def pages_of(self, request):
        return -(-(request.prompt + request.new_tokens) // self.page_size)

    def admit(self):
        while self.waiting and self.waiting[0].arrives <= self.steps:
            needed = self.pages_of(self.waiting[0])
            if self.reserved + needed > self.k.shape[1]:
                return  # in order: a long request is not overtaken for ever
            self.reserved += needed
            self.running.append(self.waiting.pop(0))

    def schedule(self):
        """[(request, tokens to take)]: requests that decode first, then prompts, up to the budget of tokens."""
        left, chosen = self.budget, []
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.done):
            take = min(len(request.tokens) - request.done, left)
            if take:
                chosen.append((request, take))
                left -= take
        return chosen

    @torch.no_grad()
    def step(self):
        self.admit()
        chosen = self.schedule()
        self.steps += 1
        if not chosen:
            return
        for request, take in chosen:
            while len(request.pages) * self.page_size < request.done + take:
                request.pages.append(self.free.pop())
        new = [request.tokens[request.done : request.done + take] for request, take in chosen]
        ints = {"dtype": torch.int32, "device": self.device}
        most = max(len(request.pages) for request, _ in chosen)
        table = torch.tensor([request.pages + [-1] * (most - len(request.pages)) for request, _ in chosen], **ints)
        held = torch.tensor([request.done for request, _ in chosen], **ints)
        starts = torch.tensor([0, *map(len, new)], device=self.device).cumsum(0).int()

        def attend(layer, q, k, v):
            return flash_attn_with_kvcache(
                q, self.k[layer], self.v[layer], k, v, rotary_cos=self.cos, rotary_sin=self.sin, rotary_interleaved=False,
                cache_seqlens=held, page_table=table, cu_seqlens_q=starts, cu_seqlens_k_new=starts,
                max_seqlen_q=max(map(len, new)), causal=True,
            )  # fmt: skip

        tokens = torch.tensor([token for part in new for token in part], device=self.device)
        logits = self.model(tokens, attend)[starts[1:].long() - 1]
        for (request, take), row, token in zip(chosen, logits, logits.argmax(-1).tolist(), strict=True):
            request.done += take
            if request.done == len(request.tokens):  # a prompt that is not read to its end says nothing yet
                request.tokens.append(token)
                request.logits.append(row)
            if request.finished():
                self.free += request.pages
                self.reserved -= self.pages_of(request)
                self.running.remove(request)

    def run(self):
        while self.waiting or self.running:
            self.step()


def dense_logits(model, tokens):
    """Of all tokens at once, without a cache: plain attention with the whole matrix of scores."""
    angles = ANGLES[: len(tokens), None].double()

    def rotated(x):
        pairs = torch.complex(*x.unflatten(-1, (2, -1)).unbind(-2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def attend(_, q, k, v):
        k, v = (x.repeat_interleave(HEADS // HEADS_KV, dim=1) for x in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / HEAD_DIM**0.5
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    return model(torch.tensor(tokens), attend)


@torch.no_grad()
def worst_error(model, requests):
    """The largest difference between logits as served and dense ones in float64, as part of the largest logit."""
    exact, worst = Model().double(), 0.0
    exact.load_state_dict(model.state_dict())
    for request in requests:
        logits = dense_logits(exact, request.tokens)[request.prompt - 1 : -1]
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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--requests", type=positive, default=12)
    parser.add_argument("--pages", type=positive, default=64)
    parser.add_argument("--page-size", type=positive, default=16)
    parser.add_argument("--budget", type=positive, default=64, help="tokens of a step")
    parser.add_argument("--check", action="store_true", help="compare with a dense computation in float64")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    model = Model().to(options.device, dtype)
    server = Server(model, options.pages, options.page_size, options.budget, options.device, dtype)
    requests = []
    for index in range(options.requests):
        prompt, new_tokens = int(torch.randint(1, 150, ())), int(torch.randint(1, 40, ()))
        requests.append(Request(torch.randint(VOCABULARY, (prompt,)).tolist(), new_tokens, arrives=2 * index))
        server.submit(requests[-1])
    begin = time.perf_counter()
    server.run()
    seconds, tokens = time.perf_counter() - begin, sum(request.new_tokens for request in requests)
    print(f"{len(requests)} requests, {tokens} new tokens in {server.steps} steps, {tokens / seconds:.0f} tokens/s")
    if options.check:
        worst, allowed = worst_error(model, requests), {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[options.dtype]
        print(f"logits differ from dense ones in float64 by at most {worst:.1e} of the largest; allowed is {allowed}")
        if worst > allowed:
            raise SystemExit(1)
    return server


if __name__ == "__main__":
    main()
