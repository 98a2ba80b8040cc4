"""Draws what suites measured, in one style: axes with units, names at the lines' ends, and bars for the middle half of
all calls.

A picture carries a digest of the files that it was drawn from, by which a test checks that it is of the current files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .series import File, Time, text

DIGEST = "flashmoe-results-sha256"
"""The name of the entry in a picture's metadata that has the digest."""
COLOURS = {
    "flashmoe": "#1f5fa8",
    "pytorch": "#e08214",
    "pytorch_graph": "#b35806",
    "transformers_grouped": "#3a9e5c",
    "transformers_batched": "#8c6bb1",
    "torchtitan": "#c51b7d",
    "megatron": "#7f9a1f",
    "deepspeed": "#35978f",
    "liger": "#bf812d",
    "liger_cute": "#d6604d",
    "gemms": "#555555",
    "exchange": "#999999",
}
NAMES = {
    "flashmoe": "FlashMoE",
    "pytorch": "PyTorch + NCCL",
    "pytorch_graph": "PyTorch, CUDA graph",
    "transformers_grouped": "Transformers grouped_mm",
    "transformers_batched": "Transformers batched_mm",
    "megatron": "Megatron-Core",
    "deepspeed": "DeepSpeed-MoE",
    "liger": "Liger-Kernel",
    "liger_cute": "LigerCute",
    "sonicmoe": "SonicMoE",
    "vllm": "vLLM",
    "deepep": "DeepEP",
    "gemms": "bare GEMMs",
    "exchange": "bare exchange",
}
FLOORS = ("gemms", "exchange")
_OTHER = ("#c51b7d", "#4d9221", "#35978f", "#bf812d", "#762a83", "#d6604d")
_PANEL = (4.6, 3.4)  # inches

Lines = dict[str, list[tuple[float, Time]]]
"""By call: a line's points, each with an x and a time."""


def colour(call: str, among: Sequence[str]) -> str:
    if call.startswith(("FlashMoE", "flashmoe")):
        return COLOURS.get(call, COLOURS["flashmoe"])
    others = [each for each in among if each not in COLOURS]
    return COLOURS.get(call) or _OTHER[others.index(call) % len(_OTHER)]


def draw_lines(
    path: Path,
    panels: dict[str, Lines],
    x: str,
    y: str,
    files: Iterable[File],
    published: dict[str, tuple[float, float, str]] | None = None,
) -> None:
    """Draws a panel for each title. `published` has for some titles a point that a paper states: x, y and whose it is.
    The y axis begins at 0, so that heights can be compared as times."""
    figure, axes_of = _figure(len(panels), y)
    for axes, (title, lines) in zip(axes_of, panels.items(), strict=True):
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xscale("log", base=2)
        said = (published or {}).get(title)
        ticks = {at for line in lines.values() for at, _ in line} | ({said[0]} if said else set())
        axes.set_xticks(sorted(ticks), [f"{each:,.0f}" for each in sorted(ticks)], fontsize=8)
        axes.minorticks_off()
        if said:
            axes.plot(said[0], said[1], "D", markerfacecolor="none", markeredgecolor="0.35", markersize=7)
            axes.annotate(
                f"{said[2]}, published",
                said[:2],
                (-8, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8,
            )
        ends = []
        for call, line in lines.items():
            points = sorted(line, key=lambda each: each[0])
            at, times = [each for each, _ in points], [time for _, time in points]
            shade = colour(call, list(lines))
            style = ":" if call in FLOORS else "-"
            axes.plot(at, [each.median for each in times], style, color=shade, marker="o", markersize=4, linewidth=1.6)
            axes.vlines(
                at, [each.lower for each in times], [each.upper for each in times], color=shade, linewidth=3, alpha=0.4
            )
            ends.append((times[-1].median, NAMES.get(call, call), shade))
        axes.set_ylim(bottom=0.0)
        axes.margins(x=0.06)
        axes.set_xlabel(x, fontsize=8)
        _label_ends(axes, ends)
    _save(figure, path, files)


def draw_bars(path: Path, panels: dict[str, dict[str, dict[str, Any]]], y: str, files: Iterable[File]) -> None:
    """Draws a panel for each title, with groups of bars. A bar has a name, and is a number, a `Time`, or a number that
    others have published (`Published`)."""
    figure, axes_of = _figure(len(panels), y, wide=True)
    for axes, (title, groups) in zip(axes_of, panels.items(), strict=True):
        axes.set_title(title, fontsize=9, loc="left")
        names = list(dict.fromkeys(name for group in groups.values() for name in group))
        at, ticks = 0.0, []
        for group, bars in groups.items():
            begin = at
            for name, value in bars.items():
                _bar(axes, at, value, NAMES.get(name, name), colour(name, names))
                at += 1.0
            ticks.append(((begin + at - 1.0) / 2, group))
            at += 0.8
        axes.set_yticks([each for each, _ in ticks], [label for _, label in ticks], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(left=0.0)
        axes.margins(x=0.35)
        axes.set_xlabel(y, fontsize=8)
        axes.set_ylabel("")
        axes.tick_params(axis="y", length=0)
    _save(figure, path, files)


class Published(float):
    """A number that others have published. Its bar is drawn hollow."""


def _bar(axes: Any, at: float, value: Any, name: str, shade: str) -> None:
    length = value.median if isinstance(value, Time) else float(value)
    hollow = isinstance(value, Published)
    how = {"facecolor": "none", "edgecolor": "0.35", "hatch": "////"} if hollow else {"color": shade}
    axes.barh(at, length, height=0.86, linewidth=0.8, **how)
    if isinstance(value, Time):
        axes.hlines(at, value.lower, value.upper, color="0.1", linewidth=1.2)
    of = f"{name}, published" if hollow else name
    axes.annotate(f"{length:,.4g}  {of}", (length, at), (4, 0), textcoords="offset points", va="center", fontsize=7.5)


def _figure(panels: int, y: str, wide: bool = False) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    columns = min(panels, 2 if wide else 3)
    rows = -(-panels // columns)
    width, height = (6.6 if wide else _PANEL[0], _PANEL[1] * (1.1 if wide else 1.0))
    figure = Figure(figsize=(width * columns, height * rows), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes_of = [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]
    for i, axes in enumerate(axes_of):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if wide else "y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
        if i % columns == 0:
            axes.set_ylabel(y, fontsize=8)
    return figure, axes_of


def _label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Writes names at the right ends of lines, and moves them apart where they would overlap."""
    most = axes.get_ylim()[1]
    least_gap = most * 0.062
    at = -least_gap
    for height, name, shade in sorted(ends):
        at = max(height, at + least_gap)
        axes.annotate(
            name,
            (1.0, at / most),
            (3, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=shade,
            annotation_clip=False,
        )


def digest(files: Iterable[File]) -> str:
    content = hashlib.sha256()
    for file in files:
        content.update(text(file.path).encode())
    return content.hexdigest()[:16]


def _save(figure: Any, path: Path, files: Iterable[File]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={DIGEST: digest(files), "Software": None})


def panels_of(times: Iterable[Time], title: Callable[[Time], str], x: Callable[[Time], float]) -> dict[str, Lines]:
    panels: dict[str, Lines] = {}
    for time in times:
        panels.setdefault(title(time), {}).setdefault(time.call, []).append((x(time), time))
    return panels
