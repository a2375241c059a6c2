"""Records the refusals that the tests provoke, type and sentence of each, and compares two records.

    python tools/record_refusals.py record before.json
    python tools/record_refusals.py record after.json
    python tools/record_refusals.py compare before.json after.json

`record` runs the tests of tests/api (build the target api_test first) and those of tests/python whose text mentions
pytest.raises, and needs the installed package. Words after `--` go to pytest, `-- tests/python/test_errors.py`; then the
C++ tests are left out. `compare` prints what differs and fails if anything does. Addresses and temporary paths are no part
of a record.
"""

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PATH = "FLASH_ATTENTION_RECORD_REFUSALS"
_VOLATILE = re.compile(r"0x[0-9a-fA-F]{4,}|/tmp/[^\s'\",:;)]+| at line \d+")


def record(path, pytest_arguments):
    """{test: [[type, sentence], ...]}, in the order in which a test provokes them."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "refusals")
        lines.touch()
        environment = {**os.environ, _PATH: str(lines)}
        if not pytest_arguments:
            subprocess.run(
                [ROOT / "build/release/tests/api_test", "--gtest_brief=1"], cwd=ROOT, env=environment, check=True
            )
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, *(pytest_arguments or ["tests/python"])]
        failed = subprocess.run(command, cwd=ROOT, env=environment).returncode
        found = {}
        for line in lines.read_text().splitlines():
            test, kind, sentence = line.split("\t", 2)
            found.setdefault(test, []).append([kind, _VOLATILE.sub("*", sentence)])
    Path(path).write_text(json.dumps(dict(sorted(found.items())), indent=0, ensure_ascii=False) + "\n")
    print(f"{path}: {sum(map(len, found.values()))} refusals of {len(found)} tests")
    return failed


def compare(before, after):
    before, after = (json.loads(Path(path).read_text()) for path in (before, after))
    missing, changed = sorted(before.keys() - after.keys()), 0
    for test in sorted(before.keys() & after.keys()):
        if before[test] == after[test]:
            continue
        changed += 1
        print(test)
        if len(before[test]) != len(after[test]):
            print(f"  {len(before[test])} refusals before, {len(after[test])} after")
        for was, now in zip(before[test], after[test], strict=False):
            if was != now:
                print(f"  - {': '.join(was)}\n  + {': '.join(now)}")
    for test in missing:
        print(f"{test}\n  is not in the second record")
    print(f"{len(before)} tests before, {len(after)} after: {changed} changed, {len(missing)} missing")
    return bool(changed or missing)


# The rest is a plugin of pytest, which record() names with -p.


def pytest_collection_modifyitems(config, items):
    """Keeps the tests that provoke refusals, themselves or by a function of their file."""
    kept = [item for item in items if _mentions_raises(item.function)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _mentions_raises(function):
    helpers = (vars(inspect.getmodule(function)).get(name) for name in function.__code__.co_names)
    functions = [function, *(helper for helper in helpers if inspect.isfunction(helper))]
    return any("raises(" in inspect.getsource(one) for one in functions)


def pytest_configure(config):
    import pytest

    original = pytest.raises

    def raises(*arguments, **keywords):
        found = original(*arguments, **keywords)
        if not hasattr(found, "__exit__"):  # pytest.raises(kind, function, ...)
            _write(found.value)
            return found
        return _Recorded(found)

    pytest.raises = raises


class _Recorded:
    """pytest.raises(...) as a context that leaves what it caught in the record."""

    def __init__(self, context):
        self.context = context

    def __enter__(self):
        return self.context.__enter__()

    def __exit__(self, kind, error, trace):
        if error is not None:
            _write(error)
        return self.context.__exit__(kind, error, trace)


def _write(error):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0].rpartition("/")[2]
    sentence = " ".join(str(error).splitlines()[:1])
    with open(os.environ[_PATH], "a") as file:
        file.write(f"{test}\t{type(error).__name__}\t{sentence}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("path")
    recording.add_argument("pytest_arguments", nargs="*")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before")
    comparing.add_argument("after")
    given = parser.parse_args()
    if given.verb == "record":
        return record(given.path, given.pytest_arguments)
    return compare(given.before, given.after)


if __name__ == "__main__":
    sys.exit(main())
