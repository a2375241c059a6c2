"""The same bits in serving and training: a small model samples, is trained on its own tokens, and samples again.

    python examples/same_bits.py              # all log-probabilities are equal, to the bit; fails if one is not
    python examples/same_bits.py --plain      # the difference without invariant bits

Reinforcement learning weighs a token by its probability for the trainer over that for the sampler. If they sum in another
order, that ratio is not 1 though the weights are the same. Here the sampler is the engine of serve.py: prompts in chunks,
shared prefixes, pages, one token of each request at a time. The trainer takes whole sequences, packed end to end, with
gradients. `invariant=True` gives attention of both the same bits.

Attention is a part of a model. torch computes a linear layer or a norm of another number of rows in another way, so their
bits depend on the batch. Both sides therefore run them in one fixed shape: blocks of 32 rows, the last one padded. --plain
leaves that out, too; --plain-attention leaves out `invariant` alone.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch
from flash_attention import attention_packed, prepare_qk
from serving.engine import Engine, Request
from serving.model import END, Config, Model

ROWS = 32  # of a block


def in_blocks(function, *tensors):
    """function of rows, in blocks of ROWS rows; the last block has zeros for what is missing."""
    count = len(tensors[0])
    missing = -count % ROWS
    whole = [torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x for x in tensors]
    blocks = [function(*parts) for parts in zip(*(x.split(ROWS) for x in whole), strict=True)]
    return torch.cat(blocks)[:count]


def log_probabilities(model, logits, tokens):
    """Of tokens [n], each by its row of logits [n, vocabulary]."""
    logs = model.run_rows(lambda rows: rows.float().log_softmax(-1), logits)
    return logs.gather(-1, tokens[:, None])[:, 0]


def sample(model, prompts, new_tokens, invariant, seed):
    """[(tokens, how long the prompt is, log-probabilities of the new tokens)] as a server writes them: requests come one
    after the other, and a step has the next token of some and parts of the prompts of others."""
    engine = Engine(model, pages=400, page_size=16, budget=48, invariant=invariant)  # new weights: no page is worth keeping
    requests = [Request(prompt, new_tokens, temperature=1.0, seed=seed + i) for i, prompt in enumerate(prompts)]
    for request in requests:
        request.logits = []
    coming = list(requests)
    for turn in itertools.count():
        if coming and turn % 2 == 0:
            engine.submit(coming.pop(0))
        engine.step()
        if not (coming or engine.waiting or engine.running):
            break
    found = []
    for request in requests:
        written = torch.tensor(request.tokens[request.prompt :], device=request.logits[0].device)
        found.append((request.tokens, request.prompt, log_probabilities(model, torch.stack(request.logits), written)))
    return found, engine


def trained_log_probabilities(model, sampled, invariant):
    """The same of all sequences at once, packed, with gradients; in the order of `sampled`."""
    weight = model.head.weight
    sequences = [torch.tensor(tokens[:-1], device=weight.device) for tokens, _, _ in sampled]
    starts = torch.tensor([0, *map(len, sequences)], device=weight.device).cumsum(0).int()
    longest = max(map(len, sequences))
    angles = model.angles()
    cos, sin = (of.to(weight.device, weight.dtype) for of in (angles.cos(), angles.sin()))

    def attend(layer, q, k, v):
        q, k = prepare_qk(q, k, cos=cos, sin=sin, cu_seqlens=starts)
        return attention_packed(
            q, k, v, starts, max_seqlen_q=longest, max_seqlen_kv=longest, causal=True, invariant=invariant
        )

    says = [
        torch.arange(begin + prompt - 1, end)
        for (begin, end), (_, prompt, _) in zip(itertools.pairwise(starts.tolist()), sampled, strict=True)
    ]
    logits = model(torch.cat(sequences), attend, last=torch.cat(says).to(weight.device))
    written = torch.cat([torch.tensor(tokens[prompt:], device=weight.device) for tokens, prompt, _ in sampled])
    return log_probabilities(model, logits, written)


def reward(tokens):
    """Something to learn: bytes of small letters."""
    return sum(97 <= token <= 122 for token in tokens) / len(tokens)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without invariant bits, and without fixed shapes")
    parser.add_argument("--plain-attention", action="store_true", help="without invariant bits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3, help="of sampling and a step of training")
    parser.add_argument("--requests", type=int, default=8, help="of a round")
    parser.add_argument("--new-tokens", type=int, default=32, help="of a request")
    options = parser.parse_args(arguments)
    invariant = not (options.plain or options.plain_attention)

    torch.set_num_threads(1)  # blocks are small: more threads only wait for each other
    torch.manual_seed(0)
    config = Config.read(Path(__file__).with_name("serving") / "config.json")
    model = Model(config).to(options.device, getattr(torch, options.dtype))
    if not options.plain:
        model.run_rows = in_blocks
        print(f"torch's bits depend on the number of rows: linear layers, norms and softmax run in blocks of {ROWS} rows")
    print(f"attention: invariant={invariant}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    beginning = torch.randint(END, (40,)).tolist()
    equal, count, begin = 0, 0, time.perf_counter()
    for number in range(options.rounds):
        prompts = [
            [*(beginning if i % 2 else []), *torch.randint(END, (int(torch.randint(1, 90, ())),)).tolist()]
            for i in range(options.requests)
        ]
        sampled, engine = sample(model, prompts, options.new_tokens, invariant, seed=1000 * number)
        trained = trained_log_probabilities(model, sampled, invariant)
        served = torch.cat([logs for _, _, logs in sampled])
        same = int((trained.detach() == served).sum())
        worst = (trained.detach() - served).abs().max().item()
        equal, count = equal + same, count + len(served)
        rewards = [reward(tokens[prompt:]) for tokens, prompt, _ in sampled]
        mean = sum(rewards) / len(rewards)
        sizes = [len(tokens) - prompt for tokens, prompt, _ in sampled]
        weights = [torch.full((size,), r - mean) for size, r in zip(sizes, rewards, strict=True)]
        loss = -(torch.cat(weights).to(options.device) * torch.exp(trained - served)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"round {number + 1}: {len(served)} tokens, {engine.steps} steps, {engine.cached_tokens} of prompts cached;")
        print(f"  {same} of {len(served)} log-probabilities are equal, the largest difference is {worst:.1e}")
    print(f"{equal} of {count} log-probabilities of sampler and trainer are equal ({time.perf_counter() - begin:.0f} s)")
    if invariant and not options.plain and equal != count:
        sys.exit("invariant bits: some differ")
    return equal, count


if __name__ == "__main__":
    main()
