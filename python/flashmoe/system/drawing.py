"""Pictures by matplotlib, which the rest of the package does not need."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from flashmoe_layer import install_extra

from ..errors import FlashMoEError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def missing() -> str | None:
    """Why nothing can be drawn, with the command that adds what is needed; None if pictures can be drawn."""
    if importlib.util.find_spec("matplotlib") is not None:
        return None
    return f"pictures need matplotlib, found none; to install: {install_extra('plots')}"


def require() -> None:
    """Raise `FlashMoEError` if nothing can be drawn."""
    if why := missing():
        raise FlashMoEError(why)


def new_figure(**options: Any) -> Figure:
    """A figure that is drawn into files, never into a window. `options` are those of matplotlib's `Figure`. Raises
    `FlashMoEError` if matplotlib is not installed."""
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(**options)
    FigureCanvasAgg(figure)
    return figure
