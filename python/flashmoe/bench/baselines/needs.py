"""What a baseline needs of an installation, of a machine and of a layer: why it is absent where that is lacking."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from ..layer import Sizes
from ..run import Run


@dataclass(frozen=True)
class Needs:
    """What is not said is not needed."""

    packages: tuple[str, ...] = ()
    """As they are imported."""
    gpu: bool = False
    one_rank: bool = False
    several_ranks: bool = False
    even: bool = False
    """As many experts on all ranks."""
    gated: bool = False
    bfloat16: bool = False
    """On a GPU no other type; on CPUs others too."""
    further: Callable[[Run, Sizes], str | None] | None = None
    """Why it cannot do a layer of which all else is as it needs it."""

    def lacks(self, run: Run, sizes: Sizes) -> str | None:
        """Why it is absent, the same on all ranks; None if nothing is lacking."""
        if reason := not_installed(*self.packages):
            return reason
        on_gpu = run.engine == "cuda"
        for lacking, reason in (
            (self.gpu and not on_gpu, "it needs a GPU"),
            (self.one_rank and run.ranks > 1, "its experts are one rank's"),
            (self.several_ranks and run.ranks == 1, "it exchanges rows between ranks"),
            (self.even and sizes.experts % run.ranks, "all ranks need as many experts"),
            (self.gated and not sizes.gated, "its experts are gated"),
            (self.bfloat16 and on_gpu and sizes.dtype != "bfloat16", "it is of bfloat16 alone"),
        ):
            if lacking:
                return reason
        return self.further(run, sizes) if self.further else None

    def versions(self) -> dict[str, str]:
        """Of its packages, by the names under which they are installed."""
        of = metadata.packages_distributions()
        distributions = {name for package in self.packages for name in of.get(package.partition(".")[0], ())}
        return {name: metadata.version(name) for name in sorted(distributions)}


def not_installed(*packages: str) -> str | None:
    """Why a baseline of these packages is absent; None if all are there."""
    missing = [package for package in packages if not _there(package)]
    return f"{', '.join(missing)}: not installed" if missing else None


def _there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of what it is a part of
        return False
