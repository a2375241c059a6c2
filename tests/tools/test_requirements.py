"""Requirements that several files state are the same."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_users_and_wheels_are_built_with_the_same_headers_of_jax():
    """Exact ones: a jaxlib refuses what was built with the headers of a newer one."""
    required = re.compile(r'jaxlib(\S+); python_version ([<>=]+ [^\s"]+)')
    users, wheels = (
        required.findall((ROOT / name).read_text()) for name in ("pyproject.toml", "tools/requirements/wheels.txt")
    )
    assert users == wheels
    assert len(users) == 2 and all(version.startswith("==") for version, _ in users)
    assert f'"jax>={users[0][0].removeprefix("==")}"' in (ROOT / "pyproject.toml").read_text()
