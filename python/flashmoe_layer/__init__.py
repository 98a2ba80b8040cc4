"""What this distribution has outside of the folder ``flashmoe``: its name, and in `command` the entry of the command.

Two other distributions of PyPI install files into a folder ``flashmoe`` as well: ``flashmoe-py``, which is by the
authors of the paper on FlashDMoE, and a sample package named ``flashmoe``. pip overwrites the files of one with those
of another without a warning. This module lies in another folder, so it is not overwritten, and can report the conflict.
"""

from __future__ import annotations

import os
from pathlib import Path

DISTRIBUTION = "flashmoe-layer"
"""What pip calls the package."""


def install_extra(extra: str) -> str:
    """The command that adds the packages of an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def other_distributions(site: Path) -> list[str]:
    """Names of other distributions that are installed in `site` and have files in the folder ``flashmoe`` there.

    Only distributions whose names begin with flashmoe are looked at: to read every distribution's list of files
    would take longer than the import itself.
    """
    found = []
    for name in os.listdir(site):
        distribution = name.lower().removesuffix(".dist-info").partition("-")[0]
        if not name.endswith(".dist-info") or distribution == "flashmoe_layer" or distribution[:8] != "flashmoe":
            continue
        try:
            files = (site / name / "RECORD").read_text(encoding="utf-8")
        except OSError:  # pip did not install it, or did not finish
            continue
        if any(line.startswith("flashmoe/") for line in files.splitlines()):
            found.append(distribution.replace("_", "-"))
    return sorted(found)


def refuse_other_distributions() -> None:
    """Raise `ImportError` if another distribution's files lie among those of the folder ``flashmoe``."""
    site = Path(__file__).parents[1]
    if others := other_distributions(site):
        names = " and ".join(others)
        raise ImportError(
            f"flashmoe: expected files of {DISTRIBUTION} alone in {site / 'flashmoe'}, got files of {names} too, which "
            f"is another project, and one overwrites the other; to repair: pip uninstall {' '.join(others)} "
            f"{DISTRIBUTION}, then install {DISTRIBUTION} again"
        )
