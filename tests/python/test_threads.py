"""Whose threads the CPU backend runs on: torch's OpenMP team, as many as torch says, and not in a forked child."""

import os
import subprocess
import sys
import textwrap

import flash_attention
import pytest
import reference
import torch

WHO = """
from flash_attention import _core
def who():
    return next(finding["detail"] for finding in _core.diagnose() if finding["subject"] == "CPU")
"""


@pytest.fixture(scope="module")
def python(warm_python, tmp_path_factory):
    """Runs a program; diagnosis looks at every kernel in the cache, so that is an empty one."""
    cache = tmp_path_factory.mktemp("cache")

    def run(text, python=warm_python, **environment):
        done = python("-c", WHO + textwrap.dedent(text), FLASH_ATTENTION_CACHE_DIR=str(cache), **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def needs_openmp(python):
    if "OpenMP team" not in python("import torch; print(who())"):
        pytest.skip("this torch has no OpenMP")


def new_python(*words, **environment):
    """For what libraries read, or do, while they load."""
    command, variables = [sys.executable, *words], os.environ | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def inputs(seq=300, heads=4, dim=64):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, seq, heads, dim, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("seq_q", [1, 300], ids=["decode", "prefill"])
def test_as_many_as_torch_says(needs_openmp, set_threads, seq_q):
    q, k, v = inputs()
    q = q[:, :seq_q]
    expected = reference.attention(q.double(), k.double(), v.double())[0]
    for count in (1, 2, 3, 1):
        set_threads(count)
        assert flash_attention.devices()[0]["threads"] == count
        out = flash_attention.attention(q, k, v)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_one_thread_starts_no_others(needs_openmp, python):
    """Neither a pool of ours nor a team: what a worker of a DataLoader needs."""
    python(
        """
        import os, torch, flash_attention
        torch.set_num_threads(1)
        before = len(os.listdir("/proc/self/task"))
        q = torch.randn(1, 512, 8, 64)
        flash_attention.attention(q, q, q)
        assert len(os.listdir("/proc/self/task")) == before
        """
    )


def test_torch_may_come_later(needs_openmp, python):
    python(
        """
        import numpy, time, flash_attention
        q = numpy.random.randn(1, 256, 4, 64).astype(numpy.float32)
        alone = flash_attention.attention(q, q, q)
        assert "a pool of its own" in who()
        import torch
        time.sleep(0.15)
        assert "OpenMP team" in who()
        t = torch.from_numpy(q)
        torch.testing.assert_close(flash_attention.attention(t, t, t), torch.from_numpy(alone))
        """,
        new_python,
    )


def test_all_threads_though_the_main_one_is_bound(needs_openmp, python):
    python(
        """
        import os, torch, flash_attention
        assert f"{os.cpu_count()} thread" in who(), who()
        """,
        new_python,
        OMP_PROC_BIND="true",
        OMP_NUM_THREADS=str(os.cpu_count()),
    )


def test_own_threads_on_request(python):
    python(
        """
        import torch, flash_attention
        assert "3 threads, a pool of its own" in who(), who()
        """,
        FLASH_ATTENTION_THREAD_SOURCE="own",
        FLASH_ATTENTION_THREADS="3",
    )


def test_after_fork(python):
    """A child has none of the parent's threads, and OpenMP would wait for them."""
    python(
        """
        import os, signal, torch, flash_attention
        q = torch.randn(1, 512, 4, 64)
        expected = flash_attention.attention(q, q, q).numpy()
        (q @ q.transpose(2, 3)).sum()  # torch's team is there, too
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(0 if (flash_attention.attention(q, q, q).numpy() == expected).all() else 1)
        assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_fork_while_another_thread_calls(python):
    python(
        """
        import os, signal, threading, torch, flash_attention
        q = torch.randn(1, 64, 2, 32)
        flash_attention.attention(q, q, q)  # the first call imports, under locks of Python's own
        stop = False
        def work():
            n = 0
            while not stop:
                n = n % 60 + 1
                flash_attention.attention(q[:, :n], q, q)
        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers: worker.start()
        bad = 0
        for i in range(40):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                flash_attention.attention(q[:, : i + 1], q, q)
                os._exit(0)
            bad += os.waitpid(child, 0)[1] != 0
        stop = True
        for worker in workers: worker.join()
        assert bad == 0, bad
        """
    )


def test_a_call_at_the_end_of_the_process(python):
    python(
        """
        import atexit, threading, time
        import torch, flash_attention
        q = torch.randn(1, 300, 4, 64)
        atexit.register(lambda: flash_attention.attention(q, q, q))
        flash_attention.attention(q, q, q)
        """
    )


def test_daemon_threads_that_call_at_the_end_of_the_process(python):
    """CPython unwinds such threads where they want the interpreter back."""
    python(
        """
        import threading, time
        import numpy, flash_attention
        q = numpy.ones((1, 400, 4, 64), numpy.float32)
        def spin():
            while True: flash_attention.attention(q, q, q)
        for _ in range(3): threading.Thread(target=spin, daemon=True).start()
        time.sleep(0.2)
        """,
        python=new_python,
    )
