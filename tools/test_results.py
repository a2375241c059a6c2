"""What a test run gave: read from the JUnit XML that GoogleTest and pytest both write, counted, printed."""

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Result:
    name: str
    outcome: str  # "passed", "failed" or "skipped"
    detail: str = ""  # the failure's text, or the reason of the skip


def read_junit(path: Path, prefix: str) -> list[Result]:
    """Results of one XML file. A file that is missing or cut short holds none: the caller sees that in the exit code."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return []
    results = []
    for case in root.iter("testcase"):
        name = f"{prefix}: {case.get('classname', '')}.{case.get('name', '')}"
        failures = case.findall("failure") + case.findall("error")
        skipped = case.find("skipped")
        if failures:
            text = "\n".join((f.get("message") or "") + "\n" + (f.text or "") for f in failures)
            results.append(Result(name, "failed", text.strip()))
        elif skipped is not None:
            results.append(Result(name, "skipped", skip_reason(skipped)))
        elif case.get("status") != "notrun":
            results.append(Result(name, "passed"))
    return results


def read_cpu_seconds(path: Path) -> dict[str, float]:
    """CPU time by file of tests, from the property that tests/conftest.py leaves with each test."""
    spent: Counter[str] = Counter()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        for item in case.iter("property"):
            if item.get("name") == "cpu_s":
                spent[case.get("classname", "").split(".Test")[0]] += float(item.get("value", "0"))
    return dict(spent)


def skip_reason(element: ElementTree.Element) -> str:
    """The sentence given to GTEST_SKIP or pytest.skip, without the place in the source."""
    text = (element.get("message") or element.text or "").strip()
    lines = [line for line in text.splitlines() if not re.match(r"^\S+:\d+$|^Skipped$", line.strip())]
    return " ".join(lines).strip() or "no reason given"


DETAIL_LINES = 25  # of a failure


def failed(name: str, reason: str, output: str) -> Result:
    """A program that failed: why, and the end of what it said."""
    return Result(name, "failed", "\n".join([reason, *output.splitlines()[1 - DETAIL_LINES :]]))


def print_summary(results: list[Result], detail_lines: int = DETAIL_LINES) -> int:
    """Prints failures, the reasons of skips and the closing line; returns the exit code."""
    failed = [r for r in results if r.outcome == "failed"]
    for result in failed:
        print(f"\nFAILED {result.name}")
        lines = result.detail.splitlines()
        for line in lines[:detail_lines]:
            print(f"    {line}")
        if len(lines) > detail_lines:
            print(f"    ... {len(lines) - detail_lines} more lines")
    reasons = Counter(r.detail for r in results if r.outcome == "skipped")
    if reasons:
        print("\nSkipped, and why:")
        for reason, count in reasons.most_common():
            print(f"  {count:5d}  {reason}")
    count = Counter(r.outcome for r in results)
    print(f"\n{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 1 if failed or not count["passed"] else 0
