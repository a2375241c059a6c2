"""Trains a small Llama on sequences that are cut across processes; the losses are those of one process.

torchrun --nproc-per-node 4 examples/train_long_context.py --seq 32768
torchrun --nproc-per-node 1 examples/train_long_context.py --seq 32768      # the same losses
"""

import argparse
import os

import torch
import torch.distributed as dist
from flash_attention.parallel import parallelize_transformers
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


def losses(group, device, seq=256, steps=5, batch=1, layout="zigzag", method="auto", seed=0):
    """The loss of every step, as a list; equal on all ranks."""
    torch.manual_seed(seed)  # the same weights and tokens on every rank
    config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
                         num_key_value_heads=4, max_position_embeddings=seq)  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    model = DistributedDataParallel(
        parallelize_transformers(model, group, layout=layout, method=method), process_group=group
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(steps):
        tokens = torch.randint(8, (batch, seq), device=device).cumsum(1) % config.vocab_size
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layout", default="zigzag", choices=("zigzag", "contiguous"))
    parser.add_argument("--method", default="auto", choices=("auto", "ring", "all_gather", "ulysses"))
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    found = losses(dist.group.WORLD, device, arguments.seq, arguments.steps, 1, arguments.layout, arguments.method)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, sequence {arguments.seq}:", " ".join(f"{loss:.4f}" for loss in found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
