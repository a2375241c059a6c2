"""A mistake of meaning that somebody could make, and the test that has to find it."""

import dataclasses
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Plant:
    says: str  # the mistake, in a few words
    file: str  # below the repository's root; its first part says how it is tested (planting.py)
    old: str  # occurs in the file exactly once
    new: str
    test: str  # "[VARIABLE=VALUE] PROGRAM FILTER ..." of GoogleTest, or "tests/python/test_x.py -k NAME"
    survives: str = ""  # why no test can find it; empty where one must

    def applied(self, root: Path = ROOT) -> str:
        """The file's text with the mistake in it."""
        text = (root / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.file}: the text of the plant '{self.says}' occurs {found} times, not once")
        return text.replace(self.old, self.new)


def rooms() -> list[str]:
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", "plant"))


def plants_of(room: str) -> tuple[Plant, ...]:
    """Those of tools/plants/ROOM.py."""
    return importlib.import_module(f"plants.{room}").PLANTS
