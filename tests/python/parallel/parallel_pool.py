"""Processes of torch.distributed (gloo) that run functions of the tests: started once, used by many cases."""

import multiprocessing
import os
import socket
import traceback
from dataclasses import dataclass
from datetime import timedelta

_context = multiprocessing.get_context("forkserver")
# Imported once instead of by each process: what the library, the functions and the modules they come from need.
_context.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.tensor",
        "flash_attention.parallel",
        "transformers.models.llama.modeling_llama",
        "pytest",
    ]
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Failure:
    """What a worker raised: its type's name, its message and where."""

    kind: str
    message: str
    trace: str = ""


class Pool:
    """`world` processes; every function gets (group of the first `ranks` processes, ...) and runs on these."""

    def __init__(self, world, timeout=60):
        self.world = world
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(world):
            mine, theirs = _context.Pipe()
            process = _context.Process(target=_work, args=(rank, world, port, timeout, theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def start(self, function, *arguments, ranks=None):
        for pipe in self.pipes[:ranks]:
            pipe.send((function, ranks or self.world, arguments))

    def results(self, ranks=None, seconds=120):
        """One for each rank; a Failure object where it raised, None where the process is gone."""
        found = []
        for pipe in self.pipes[:ranks]:
            try:
                found.append(pipe.recv() if pipe.poll(seconds) else Failure("hang", "no answer in time"))
            except EOFError:
                found.append(None)
        return found

    def run(self, function, *arguments, ranks=None):
        self.start(function, *arguments, ranks=ranks)
        found = self.results(ranks)
        for rank, result in enumerate(found):
            if isinstance(result, Failure):
                raise AssertionError(f"rank {rank}: {result.message}\n{result.trace}")
        return found

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


def _work(rank, world, port, timeout, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["FLASH_ATTENTION_THREADS"] = "1"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    groups = {size: dist.new_group(list(range(size))) if size < world else dist.group.WORLD for size in range(1, world + 1)}
    while True:
        try:
            function, ranks, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            torch.manual_seed(1)
            pipe.send(function(groups[ranks], *arguments))
        except Exception as error:
            pipe.send(Failure(type(error).__name__, str(error), traceback.format_exc()))
