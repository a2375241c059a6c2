"""What all Python tests share: Triton's interpreter where there is no GPU, the switch of the long tail, the CPU time."""

import os
import resource

import pytest
from warm_python import WarmPython

# Triton reads this when it is first imported, by whichever test that is: without a GPU its kernels are interpreted.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Read by OpenMP when torch loads it. Otherwise its threads spin while they wait for a thread that has no core, which was
# most of the time while other programs used the cores: 117 tests then took 30 s of CPU time, and take 4 s with this.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

WITH_LONG_TAIL = os.environ.get("FLASH_ATTENTION_TEST_ALL") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests and parameters marked `long_tail` run under `make test ALL=1` alone; others do not count them as skipped."""
    if WITH_LONG_TAIL:
        return
    tail = [item for item in items if item.get_closest_marker("long_tail")]
    if tail:
        config.hook.pytest_deselected(items=tail)
        items[:] = [item for item in items if not item.get_closest_marker("long_tail")]


@pytest.fixture(scope="session")
def warm_python():
    """Runs a Python program in a process of its own that has torch already."""
    python = WarmPython()
    yield python
    python.close()


def spent_cpu_s() -> float:
    """User and system time of this process, of the children it has waited for, and of programs of `warm_python`."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + WarmPython.spent_cpu_s


CPU_S_BEFORE = pytest.StashKey[float]()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item):
    item.stash[CPU_S_BEFORE] = spent_cpu_s()
    yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item):
    """Leaves the CPU time of the test in the report; tools/test_results.py reads it there."""
    yield
    item.user_properties.append(("cpu_s", spent_cpu_s() - item.stash[CPU_S_BEFORE]))
