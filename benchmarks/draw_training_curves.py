"""Draw the curves that training_curves.py has measured.

    python benchmarks/draw_training_curves.py benchmarks/results/training_curves/amd-epycx0.json \\
        docs/images/training_curves.png

The upper picture shows the losses, whose curves lie upon one another. The lower picture shows how far each curve is
from that with eager experts.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from training_curves import BOUND, EAGER

STYLES = (
    {"color": "#e08214", "linestyle": "-", "linewidth": 2.4},
    {"color": "#1f5fa8", "linestyle": (0, (2, 2)), "linewidth": 1.4},
)
NO_DIFFERENCE = 1e-8
"""At this value, in nats a token, a difference of 0 is drawn: the axis is logarithmic, and losses have 8 decimals."""


def draw(result: dict[str, Any], path: pathlib.Path) -> None:
    curves = dict(result["losses"])
    eager = curves.pop(EAGER)
    steps = range(len(eager))
    shape = {"figsize": (12, 6.4), "dpi": 110, "sharex": True, "gridspec_kw": {"height_ratios": [3, 2], "hspace": 0.08}}
    figure, (above, below) = plt.subplots(2, 1, **shape)
    above.plot(steps, eager, color="0.75", linewidth=7, label="eager, 1 process")
    for (name, curve), style in zip(curves.items(), STYLES, strict=True):
        above.plot(steps, curve, **style, label=name)
        apart = [max(abs(ours - theirs), NO_DIFFERENCE) for ours, theirs in zip(curve, eager, strict=True)]
        below.plot(steps, apart, **style | {"linewidth": 1})
        below.plot(
            steps[::10], apart[::10], style["color"], linestyle="", marker="o", markersize=3 + style["linewidth"]
        )
    above.set_ylabel("loss (nats per token)")
    above.set_ylim(bottom=0.0)
    # A legend, and no names at the curves' ends: the curves lie upon one another, so their ends cannot be told apart.
    above.legend(
        loc=(0.4, 0.62), frameon=False, labelcolor=["0.45", *(style["color"] for style in STYLES)], handlelength=4
    )
    below.axhline(BOUND, color="0.4", linewidth=1, linestyle=":")
    below.annotate(f"bound at every tenth step (dots): {BOUND:g}", (0, BOUND), (0, 3), textcoords="offset points")
    below.margins(x=0.01)
    below.set_yscale("log")
    below.set_ylim(NO_DIFFERENCE / 2, 10 * BOUND)
    below.set_ylabel("difference from eager\n(nats per token)")
    below.set_xlabel(f"step, of {result['batch']} windows of {result['window']} tokens each")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9", linewidth=0.6)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    args = parser.parse_args()
    draw(json.loads(args.result.read_text()), args.picture)


if __name__ == "__main__":
    main()
