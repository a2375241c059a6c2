"""Trains a small Llama the way TorchTitan does, in a minute on a CPU: packed documents, a device mesh, shards, checkpoints.

python examples/train_llama.py                                            # one process
torchrun --nproc-per-node 2 examples/train_llama.py                       # parameters in shards (FSDP2), two batches a step
torchrun --nproc-per-node 2 examples/train_llama.py --context-parallel 2  # each process holds half of a sequence
python examples/train_llama.py --folder run --steps 60                    # leaves checkpoints in run/
python examples/train_llama.py --folder run --steps 120                   # goes on from the last one
"""

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from flash_attention import attention_packed, prepare_qk, rotary_tables
from flash_attention.parallel import context_attention, document_positions, shift_labels, split
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recomputed

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Config:
    vocabulary: int = 256  # bytes
    width: int = 128
    heads: int = 8
    heads_kv: int = 2
    layers: int = 4
    hidden: int = 352
    theta: float = 10000.0
    seq: int = 1024


class Attention(nn.Module):
    def __init__(self, config, context):
        super().__init__()
        self.head_dim, self.context = config.width // config.heads, context
        self.sizes = [config.heads, config.heads_kv, config.heads_kv]
        self.qkv = nn.Linear(config.width, sum(self.sizes) * self.head_dim, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x, batch, angles):
        """x [1, rows, width]: the rows of a sequence that this process has."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.sizes, -2)
        q, k = prepare_qk(q, k, cos=angles[0], sin=angles[1], angle_positions=batch.places[None])
        if self.context.size() == 1:
            out = attention_packed(q[0], k[0], v[0], batch.starts, causal=True)
        else:
            out = context_attention(q[0], k[0], v[0], self.context, cu_seqlens=batch.starts, causal=True)
        return self.out(out.flatten(-2))[None]


class Block(nn.Module):
    def __init__(self, config, context):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(config.width), nn.RMSNorm(config.width)])
        self.attention = Attention(config, context)
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x, batch, angles):
        x = x + self.attention(self.norms[0](x), batch, angles)
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, config, context, recompute=False):
        super().__init__()
        self.config, self.recompute = config, recompute
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList([Block(config, context) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, batch):
        angles = rotary_tables(self.config.seq, self.config.width // self.config.heads, self.config.theta)
        angles = [table.to(batch.tokens.device) for table in angles]
        x = self.embedding(batch.tokens)[None]
        for block in self.blocks:
            x = recomputed(block, x, batch, angles, use_reentrant=False) if self.recompute else block(x, batch, angles)
        return self.head(self.norm(x))


@dataclass
class Batch:
    """The rows of a sequence that a process has: [rows]. Documents begin at `starts` of the whole sequence."""

    tokens: torch.Tensor
    labels: torch.Tensor
    places: torch.Tensor  # of the tokens in their documents
    starts: torch.Tensor


def batch_of(documents, seq, step, turn, context, device):
    """Documents drawn for this step and this turn, end to end; the last one is cut where the sequence ends."""
    generator = torch.Generator().manual_seed(1000003 * turn + step)
    drawn, starts = [], [0]
    while starts[-1] < seq:
        document = documents[int(torch.randint(len(documents), (1,), generator=generator))][: seq - starts[-1]]
        drawn.append(document)
        starts.append(starts[-1] + len(document))
    tokens, starts = torch.cat(drawn), torch.tensor(starts, dtype=torch.int32)
    whole = tokens, shift_labels(tokens, cu_seqlens=starts), document_positions(starts).int()
    mine = (split(rows, context.size(), context.get_local_rank(), dim=0).to(device) for rows in whole)
    return Batch(*mine, starts.to(device) if context.size() == 1 else starts)


def read_documents(files):
    """Each section of each file, as bytes."""
    sections = [section for file in files for section in file.read_text(encoding="utf-8").split("\n## ") if section]
    return [torch.tensor(list(section.encode()), dtype=torch.int64) for section in sections]


def trainer(config, mesh, steps, peak=3e-3, recompute=False, seed=0):
    """(model, optimizer, schedule), the model in shards over all processes of the mesh."""
    torch.manual_seed(seed)
    model = Llama(config, mesh["context"], recompute).to(mesh.device_type)
    if mesh.size() > 1:
        shards = mesh["data", "context"]._flatten("shards")
        for block in model.blocks:
            fully_shard(block, mesh=shards)
        fully_shard(model, mesh=shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, steps // 10)
    factor = lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(1, step / steps)))  # noqa: E731
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_step(model, optimizer, schedule, batch, group=None):
    """(loss, norm of the gradient), each of the tokens of all processes together."""
    world, tokens = dist.get_world_size(group), (batch.labels >= 0).sum()
    dist.all_reduce(tokens, group=group)
    total = F.cross_entropy(model(batch).flatten(0, 1).float(), batch.labels, reduction="sum")
    (total * world / tokens).backward()  # FSDP2 takes the mean of the processes' gradients
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    optimizer.step(), schedule.step(), optimizer.zero_grad()
    total = total.detach()
    dist.all_reduce(total, group=group)
    return (total / tokens).item(), norm.item()


def state_of(model, optimizer, schedule):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "schedule": schedule.state_dict()}


def save(folder, step, trained, group=None):
    checkpoint.save(state_of(*trained), checkpoint_id=folder / f"step_{step}", process_group=group)


def load(folder, trained, group=None):
    """The step to go on with. Another number of processes may have written the checkpoint."""
    found = sorted(folder.glob("step_*/.metadata"), key=lambda path: int(path.parent.name.removeprefix("step_")))
    if not found:
        return 0
    model, optimizer, schedule = trained
    state = state_of(*trained)
    checkpoint.load(state, checkpoint_id=found[-1].parent, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return schedule.last_epoch


def train(
    config, mesh, documents, steps, recompute=False, folder=None, keep_every=50, group=None, report=lambda *figures: None
):
    """The losses of the steps that were still to be made. `group`: the processes of the mesh; None: all."""
    trained = trainer(config, mesh, steps, recompute=recompute)
    first, losses = load(folder, trained, group) if folder else 0, []
    for step in range(first, steps):
        begin = time.monotonic()
        batch = batch_of(documents, config.seq, step, mesh["data"].get_local_rank(), mesh["context"], mesh.device_type)
        loss, norm = train_step(*trained, batch, group)
        losses.append(loss)
        report(step, loss, norm, mesh["data"].size() * config.seq / (time.monotonic() - begin))
        if folder and (step + 1 == steps or (step + 1) % keep_every == 0):
            save(folder, step + 1, trained, group)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="*", default=sorted((ROOT / "docs").glob("*.md")))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seq", type=int, default=Config.seq)
    parser.add_argument("--context-parallel", type=int, default=1, help="processes that share a sequence")
    parser.add_argument("--recompute", action="store_true", help="keep no activations of a block; compute them again")
    parser.add_argument("--folder", type=Path, help="for checkpoints")
    given = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1"), os.environ.setdefault("MASTER_PORT", "0")
    world = int(os.environ.setdefault("WORLD_SIZE", "1"))
    rank = int(os.environ.setdefault("RANK", "0"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(
        device, (world // given.context_parallel, given.context_parallel), mesh_dim_names=("data", "context")
    )
    documents, config = read_documents(given.text), Config(seq=given.seq)

    def report(step, loss, norm, speed):
        if rank == 0 and (step % 10 == 0 or step + 1 == given.steps):
            print(f"step {step:4}   loss {loss:.3f}   gradient {norm:.2f}   {speed:.0f} tokens/s", flush=True)

    if rank == 0:
        print(f"{len(documents)} documents, processes: {world}, on a sequence of {given.seq}: {given.context_parallel}")
    train(config, mesh, documents, given.steps, given.recompute, given.folder, report=report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
