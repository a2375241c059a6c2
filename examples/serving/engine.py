"""Continuous batching: each step takes the next token of every running request and chunks of prompts that are not read yet,
end to end, through the model. A layer makes one call: it turns new queries and keys, writes the keys to pages, attends."""

import queue
import random
import threading
import time
import traceback

import torch
from flash_attention.flash_attn import flash_attn_with_kvcache
from serving.model import END
from serving.pages import Pages


class Request:
    """tell(tokens, reason) is called from the engine's thread: new tokens, then "stop", "length", "left" or "error"."""

    def __init__(self, prompt, new_tokens, temperature=0.0, top_p=1.0, seed=None, tell=lambda tokens, reason: None):
        self.tokens, self.prompt, self.most = list(prompt), len(prompt), len(prompt) + new_tokens
        self.temperature, self.top_p, self.random, self.tell = temperature, top_p, random.Random(seed), tell
        self.pages, self.cached = [], 0
        self.done = 0  # tokens whose keys are in the cache
        self.left = False  # nobody waits for it any more
        self.logits = None  # a list, if they are to be kept

    def reason(self):
        """Why it has ended, or None."""
        if len(self.tokens) > self.prompt and self.tokens[-1] == END:
            return "stop"
        return "length" if len(self.tokens) == self.most else None


class Engine:
    """One step after the other, of requests that wait until the cache has room for all of their life."""

    def __init__(self, model, pages, page_size, budget, invariant=None):
        self.model, self.budget, self.config, self.invariant = model, budget, model.config, invariant
        weight = model.head.weight
        shape = (self.config.num_hidden_layers, pages, page_size, self.config.num_key_value_heads, self.config.head_dim)
        self.k, self.v = (torch.zeros(shape, device=weight.device, dtype=weight.dtype) for _ in range(2))
        angles = model.angles()
        self.cos, self.sin = (of.to(weight.device, weight.dtype) for of in (angles.cos(), angles.sin()))
        self.pages = Pages(pages, page_size)
        self.waiting, self.running = [], []
        self.new_tokens = self.read_tokens = self.cached_tokens = self.steps = 0

    def submit(self, request):
        self.refuse_impossible(request)
        self.waiting.append(request)

    def refuse_impossible(self, request):
        room = min(self.pages.count * self.pages.page_size, self.config.max_position_embeddings)
        if not request.prompt or request.most > room:
            raise ValueError(
                f"the prompt has {request.prompt} tokens, with new ones {request.most}; allowed are 1 to {room}"
            )

    @torch.no_grad()
    def step(self):
        for request in [request for request in (*self.waiting, *self.running) if request.left]:
            self.end(request, "left")
        self._admit()
        chosen = self._schedule()
        if chosen:
            logits = self._forward(chosen)
            self._extend(chosen, logits)
            self.steps += 1

    def _admit(self):
        while self.waiting:
            request = self.waiting[0]
            shared = self.pages.begin(request.tokens, request.most)
            if shared is None:
                return  # in order: a long request is not overtaken for ever
            request.pages = shared
            request.done = request.cached = len(shared) * self.pages.page_size
            self.cached_tokens += request.cached
            self.running.append(self.waiting.pop(0))

    def _schedule(self):
        """[(request, tokens to take)]: requests that decode first, then prompts, up to the budget of tokens."""
        left, chosen = self.budget, []
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.done > 1):
            take = min(len(request.tokens) - request.done, left)
            if take:
                chosen.append((request, take))
                left -= take
        return chosen

    def _forward(self, chosen):
        """Logits behind the last token that each request takes."""
        for request, take in chosen:
            while len(request.pages) * self.pages.page_size < request.done + take:
                request.pages.append(self.pages.take())
        new = [request.tokens[request.done : request.done + take] for request, take in chosen]
        device = self.k.device
        most = max(len(request.pages) for request, _ in chosen)
        rows = [request.pages + [-1] * (most - len(request.pages)) for request, _ in chosen]
        table = torch.tensor(rows, dtype=torch.int32, device=device)
        held = torch.tensor([request.done for request, _ in chosen], dtype=torch.int32, device=device)
        starts = torch.tensor([0, *map(len, new)], device=device).cumsum(0).int()

        def attend(layer, q, k, v):
            return flash_attn_with_kvcache(
                q, self.k[layer], self.v[layer], k, v, rotary_cos=self.cos, rotary_sin=self.sin, rotary_interleaved=False,
                cache_seqlens=held, page_table=table, cu_seqlens_q=starts, cu_seqlens_k_new=starts,
                max_seqlen_q=max(map(len, new)), causal=True, invariant=self.invariant,
            )  # fmt: skip

        tokens = torch.tensor([token for part in new for token in part], device=device)
        return self.model(tokens, attend, last=starts[1:].long() - 1)

    def _extend(self, chosen, logits):
        for (request, take), row, token in zip(chosen, logits, sampled(logits, [r for r, _ in chosen]), strict=True):
            first = request.done // self.pages.page_size
            request.done += take
            self.read_tokens += take
            for index in range(first, request.done // self.pages.page_size):
                size, before = self.pages.page_size, request.pages[index - 1] if index else None
                tokens = request.tokens[index * size : (index + 1) * size]
                self.pages.remember(before, request.pages[index], tokens)
            if request.done < len(request.tokens):
                continue  # a prompt that is not read to its end says nothing yet
            request.tokens.append(token)
            self.new_tokens += 1
            if request.logits is not None:
                request.logits.append(row)
            request.tell([token], None)
            if request.reason():
                self.end(request, request.reason())

    def end(self, request, reason):
        if request in self.running:
            self.running.remove(request)
            self.pages.end(request.pages, request.most)
        else:
            self.waiting.remove(request)
        request.tell([], reason)


def sampled(logits, requests):
    """A token for each row: the likeliest at temperature 0, else one of the fewest tokens with top_p of the probability."""
    temperature = torch.tensor([request.temperature for request in requests], device=logits.device)[:, None]
    top_p = torch.tensor([request.top_p for request in requests], device=logits.device)[:, None]
    draw = torch.tensor([request.random.random() for request in requests], device=logits.device)[:, None]
    scaled = logits.float() / temperature.clamp(min=1e-4)
    probability, order = scaled.softmax(-1).sort(-1, descending=True)
    before = probability.cumsum(-1) - probability
    kept = torch.where(before < top_p, probability, 0.0).cumsum(-1)
    place = (kept <= draw * kept[:, -1:]).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    place = torch.where(temperature > 0, place, 0)
    return order.gather(-1, place)[:, 0].tolist()


class Worker(threading.Thread):
    """The thread that owns an engine. Others hand requests over and may leave them."""

    def __init__(self, engine, progress=None, most_waiting=256):
        super().__init__(daemon=True, name="engine")
        self.engine, self.progress, self.most_waiting = engine, progress, most_waiting
        self.inbox, self.stopping = queue.SimpleQueue(), False

    def submit(self, request):
        """False if too many wait already."""
        self.engine.refuse_impossible(request)
        if len(self.engine.waiting) + self.inbox.qsize() >= self.most_waiting:
            return False
        self.inbox.put(request)
        return True

    def leave(self, request):
        request.left = True
        self.inbox.put(None)  # wakes the thread

    def stop(self):
        self.stopping = True
        self.inbox.put(None)
        self.join()

    def run(self):
        engine, told, tokens = self.engine, time.monotonic(), 0
        while not self.stopping:
            idle = not (engine.waiting or engine.running)
            while idle or not self.inbox.empty():
                request, idle = self.inbox.get(), False
                if request is not None:
                    engine.submit(request)
            try:
                engine.step()
            except Exception:  # a step that fails ends its requests; the server goes on
                traceback.print_exc()
                for request in [*engine.waiting, *engine.running]:
                    engine.end(request, "error")
            now = time.monotonic()
            if self.progress is not None and now - told >= 1:
                self.progress(engine, (engine.new_tokens - tokens) / (now - told))
                told, tokens = now, engine.new_tokens


def progress_line(engine, speed):
    pages = engine.pages
    return (
        f"{len(engine.running)} running, {len(engine.waiting)} waiting, {pages.used()} of {pages.count} pages used, "
        f"{len(pages.idle)} remembered, {engine.new_tokens} new tokens, {engine.cached_tokens} of prompts not read again, "
        f"{speed:.0f} tokens/s"
    )
