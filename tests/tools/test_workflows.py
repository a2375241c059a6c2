"""The forge's workflows call make targets that exist, and nothing else."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PUBLISH = "pypa/gh-action-pypi-publish@release/v1"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_step_is_a_make_target_or_an_action_of_the_forge(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) or step["uses"] == PUBLISH, step
        else:
            words = step["run"].split()
            assert words[0] == "make" and words[1] in TARGETS and words[2:] in ([], ["ALL=1"]), step


def test_only_a_tag_is_published_and_without_a_password():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    (publish,) = [job for job in jobs.values() if any(step.get("uses") == PUBLISH for step in job["steps"])]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')" and set(publish["needs"]) == set(jobs) - {"publish"}
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"]
    assert not any("password" in step.get("with", {}) for step in publish["steps"])
    uploaded = "\n".join(
        step["with"]["path"]
        for job in jobs.values()
        for step in job["steps"]
        if step.get("with", {}).get("name", "").startswith("python-")
    )
    assert all(path.startswith("dist/exact_attention") for path in uploaded.split())  # no Debian package among them


def test_what_a_release_needs_is_covered():
    called = set(re.findall(r"run: make ([a-z-]+)", "\n".join(path.read_text() for path in WORKFLOWS)))
    assert {"lint", "test", "sanitize", "packages", "docs", "wheels", "wheels-test", "kernels-wheel", "fuzz"} <= called


def test_every_target_says_what_it_does():
    documented = set(re.findall(r"^([a-z-]+):.*## \w", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert documented == TARGETS
