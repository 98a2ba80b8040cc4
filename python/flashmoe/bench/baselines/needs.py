"""What a baseline needs of an installation, a machine and a layer. A baseline is absent if something is lacking."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from ..layer import Sizes
from ..run import Run


@dataclass(frozen=True)
class Needs:
    """What a baseline needs. A baseline sets only the fields for what it needs."""

    packages: tuple[str, ...] = ()
    """The packages, by the names under which they are imported."""
    gpu: bool = False
    one_rank: bool = False
    several_ranks: bool = False
    even: bool = False
    """All ranks have the same number of experts."""
    gated: bool = False
    bfloat16: bool = False
    """The layer's type must be bfloat16 on a GPU; on CPUs it may be any."""
    further: Callable[[Run, Sizes], str | None] | None = None
    """Why the baseline cannot compute a layer that meets all other needs; None if it can."""

    def lacks(self, run: Run, sizes: Sizes) -> str | None:
        """Why the baseline is absent, the same on all ranks; None if nothing is lacking."""
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
        """The versions of the baseline's packages, by the names under which they are installed."""
        of = metadata.packages_distributions()
        distributions = {name for package in self.packages for name in of.get(package.partition(".")[0], ())}
        return {name: metadata.version(name) for name in sorted(distributions)}


def not_installed(*packages: str) -> str | None:
    """Why a baseline that needs these packages is absent; None if all are installed."""
    missing = [package for package in packages if not _there(package)]
    return f"{', '.join(missing)}: not installed" if missing else None


def _there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that contains it is missing
        return False
