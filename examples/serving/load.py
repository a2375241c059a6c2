"""A bounded load on a server: so many requests by so many clients at a time, over loopback. A quarter of the clients leave
before their answer ends."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from urllib.parse import urlsplit

BEGINNINGS = [" ".join(["The same beginning, again and again."] * 4), "Another one. " * 12, ""]


class Outcome(Counter):
    """How many requests were complete, left or wrong, and what the complete ones brought."""

    def __str__(self):
        speed, times = self["tokens"] / self.seconds, sorted(self.times) or [0.0]
        return (
            f"{self['complete']} complete, {self['left']} left, {self['wrong']} wrong; {self['tokens']} tokens in "
            f"{self.seconds:.1f} s, {speed:.0f} tokens/s; {self['cached']} tokens of prompts were cached; first token "
            f"after {1000 * times[len(times) // 2]:.0f} ms in the median, {1000 * times[-1]:.0f} ms at most"
        )


def load(address, count, clients, seed=0, most_tokens=40):
    """Sends `count` requests and waits for the server to be idle again."""
    outcome, numbers, lock = Outcome(), iter(range(count)), threading.Lock()
    outcome.times, outcome.problems = [], []
    begin = time.monotonic()

    def client():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            rng = random.Random(f"{seed} {number}")
            try:
                found = one(address, rng, most_tokens)
            except Exception as error:  # what goes wrong is counted, and told at the end
                found = {"wrong": 1, "problem": repr(error)}
            with lock:
                if "problem" in found:
                    outcome.problems.append(found.pop("problem"))
                if "first" in found:
                    outcome.times.append(found.pop("first"))
                outcome.update(found)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.seconds = time.monotonic() - begin
    outcome.health = wait_until_idle(address)
    return outcome


def one(address, rng, most_tokens):
    """What one request brought; it is checked."""
    prompt = rng.choice(BEGINNINGS) + "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 200)))
    wanted, stream, leaves = rng.randint(1, most_tokens), rng.random() < 0.6, rng.random() < 0.25
    body = {"prompt": prompt, "max_tokens": wanted, "temperature": rng.choice([0, 0.7, 1.5]), "top_p": rng.choice([1, 0.9])}
    body |= {"seed": rng.randint(0, 99), "stream": stream}
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)
    begin = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if leaves and not stream:
        time.sleep(rng.random() * 0.2)
        connection.sock.close()
        return {"left": 1}
    answer = connection.getresponse()
    if answer.status != 200:
        return {"wrong": 1, "problem": f"{answer.status} {answer.read()!r}"}
    if not stream:
        found = json.loads(answer.read())
        return judged(found["choices"][0]["finish_reason"], found["usage"], prompt, wanted)
    first = reason = usage = None
    for events, line in enumerate(answer):
        if first is None:
            first = time.monotonic() - begin
        if leaves and events >= 3:
            answer.close()
            connection.close()
            return {"left": 1, "first": first}
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            usage = event.get("usage")
            reason = event["choices"][0]["finish_reason"] if event["choices"] else reason
    connection.close()
    return {**judged(reason, usage, prompt, wanted), "first": first}


def judged(reason, usage, prompt, wanted):
    new = usage["completion_tokens"]
    right = usage["prompt_tokens"] == len(prompt) and (
        new == wanted if reason == "length" else reason == "stop" and new <= wanted
    )
    if not right:
        return {"wrong": 1, "problem": f"{reason}: {usage}, wanted {wanted} tokens"}
    return {"complete": 1, "tokens": new, "cached": usage["prompt_tokens_details"]["cached_tokens"]}


def wait_until_idle(address, seconds=10):
    """The last state of the server: nothing runs, waits or holds a page, or the time is over."""
    until = time.monotonic() + seconds
    while True:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=10)
        connection.request("GET", "/health")
        health = json.loads(connection.getresponse().read())
        connection.close()
        busy = health["running"] or health["waiting"] or health["pages_used"]
        if not busy or time.monotonic() > until:
            return health
        time.sleep(0.05)
