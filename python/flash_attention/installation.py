"""Finds the owner of the package's files: a package index has another project with the import name flash_attention."""

import os
import warnings

DISTRIBUTION = "exact-attention"
IMPORT_NAME = "flash_attention"


def advice(others: list[str]) -> str:
    """The commands to type if these distributions also own files of the package."""
    return f"pip uninstall {' '.join(others)} {DISTRIBUTION}, then install {DISTRIBUTION} again"


def other_owners() -> list[str]:
    """Other distributions that own files of this package. Reads the lists of files of all of them."""
    from importlib import metadata

    owners = {
        distribution.metadata["Name"]
        for distribution in metadata.distributions()
        if f"\n{IMPORT_NAME}/" in "\n" + (distribution.read_text("RECORD") or "")
    }
    return sorted(owner for owner in owners if owner.lower().replace("_", "-") != DISTRIBUTION)


def warn_of_namesake(folder: str) -> None:
    """Warns if the package's folder contains a distribution with the package's name: that is another project.

    It runs at import, so it only reads the names in the folder; doctor() checks every distribution.
    """
    try:
        names = os.listdir(folder)
    except OSError:  # in an archive
        return
    for name in names:
        if name.startswith(f"{IMPORT_NAME}-") and name.endswith((".dist-info", ".egg-info")):
            warnings.warn(
                f"{name.rpartition('.')[0]} in {folder} is another project with the import name {IMPORT_NAME}: the files "
                f"of both are mixed, and either may be damaged; {advice([IMPORT_NAME])}",
                stacklevel=3,
            )
