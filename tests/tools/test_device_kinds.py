"""What depends on the kind of a device is a field of its backend's row (src/backend/backend.h): no code compares kinds."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("src", "cli", "python/binding", "include")
KIND = r"(?:\w+::)*DeviceKind::\w+"
TESTS = re.compile(rf"[=!]=\s*{KIND}|{KIND}\s*[=!]=|\bcase\s+{KIND}|switch\s*\([\w.]*device\.kind\)|\bdevice\.kind\s*[=!]=")


def comparisons(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if TESTS.search(line)]


def test_no_code_asks_for_the_kind_of_a_device():
    found = []
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*")):
            if file.suffix in {".h", ".cpp"}:
                name = file.relative_to(ROOT).as_posix()
                found += [f"{name}: {line}" for line in comparisons(file.read_text(encoding="utf-8"))]
    assert found == [], "ask device_traits() or the backend's row instead"


def test_the_rule_sees_every_way_to_ask():
    asked = [
        "if (device.kind == DeviceKind::cpu) return;",
        "options.device.kind != flash_attention::DeviceKind::cuda",
        "case DeviceKind::emulator:",
        "switch (device.kind) {",
        "if (DeviceKind::cpu == kind)",
    ]
    assert all(comparisons(line) for line in asked)
    allowed = ["info.device = {.kind = DeviceKind::cpu};", ".device = DeviceKind::cuda,", "switch (isa) {"]
    assert not any(comparisons(line) for line in allowed)
