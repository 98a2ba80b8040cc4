"""Makes docs/performance.md: the tables and figures of both papers, and for each suite its measurements, with pictures
and tables, and what is absent and why.

The page depends only on the files of results, so that a test can make it again and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flashmoe.bench.plan import Suite
from flashmoe.bench.suites import SUITES

from . import figures
from .figures import panels_of
from .papers import ITEMS, PUBLISHED
from .series import LEAST_MOST, File, Time, files

PICTURES = Path("images") / "performance"
"""The folder of pictures, relative to the folder of the page."""

Drawer = Callable[[Path, list[File]], bool]
"""Draws a suite's picture from its files. Returns False if there was nothing to draw."""
Panels = dict[str, dict[str, dict[str, Any]]]
"""Bars by panel, group and name."""


def write(folder: Path, page: Path) -> list[Path]:
    """Writes the page and its pictures from the files in `folder`. Returns the pictures' paths."""
    found = files(folder)
    drawn = {}
    for name in SUITES:
        picture = page.parent / PICTURES / f"{name}.png"
        if found.get(name) and name in DRAWERS and DRAWERS[name](picture, found[name]):
            drawn[name] = picture
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(markdown(found, set(drawn)))
    return list(drawn.values())


def markdown(found: dict[str, list[File]], drawn: set[str]) -> str:
    """The page's text. `drawn`: the suites that have a picture."""
    parts = [_INTRODUCTION, _items(found), _baselines()]
    for suite in SUITES.values():
        parts.append(_section(suite, found.get(suite.name, []), suite.name in drawn))
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """# Performance

This page is made by `python tools/performance_page.py docs/performance.md benchmarks/results` from the files that it
names, and by nothing else; what was found while the kernels were written is in [measured.md](measured.md). Every point
was checked beside float64 before it was timed, and a check that fails voids it. Milliseconds are medians of single
calls, of each call the slowest rank's, with the middle half of all calls in parentheses. "busy" is behind work that
hides launches, "plain" has them in it; in one point all calls take turns, in the same processes, on the same inputs,
and ratios are meant between these alone. What papers publish was measured on other machines: it is printed as
published, and no ratio to it is drawn.

`flashmoe bench` measures on the machine that it is started on, `--suite` names a part, `--ranks` how many ranks its
points are to have, `--budget` bounds its seconds, and a run goes on where the last one stopped.
`flashmoe bench --compare A.json B.json` says what differs between two files by more than the spread."""


def _items(found: dict[str, list[File]]) -> str:
    rows = []
    for item in ITEMS:
        if item.suite is None:
            rows.append((f"{item.paper}, {item.name}", item.shows, "-", f"not measured: {item.needs}"))
            continue
        shared = ", shared by two ranks"
        gpus = sorted({file.device + shared * file.shared for file in found.get(item.suite, [])})
        state = "; ".join(gpus) if gpus else "no run yet"
        lacks = f"; as published it needs {item.needs}" if item.needs else ""
        rows.append((f"{item.paper}, {item.name}", item.shows, f"`flashmoe bench --suite {item.suite}`", state + lacks))
    head = "## Tables and figures of both papers\n\n"
    return head + _table(("table or figure", "shows", "command", "measured on"), rows)


_BASELINES = """## Baselines

In the same processes, where they are installed; each point names those that are absent. The work before a call hides
half a millisecond of launches: where the host launches longer, or waits for the GPU, "busy" has the rest."""


def _baselines() -> str:
    from flashmoe.bench.baselines import TABLE

    return f"{_BASELINES}\n\n" + _table(("baseline", "adapter", "state"), TABLE)


def _section(suite: Suite, of: list[File], drawn: bool) -> str:
    regenerates = f" Regenerates {'; '.join(suite.figures)}." if suite.figures else ""
    lines = [f"## {suite.name}: {suite.shows}", f"`flashmoe bench --suite {suite.name}`.{regenerates}"]
    if drawn:
        lines.append(f"![{suite.shows}]({(PICTURES / suite.name).as_posix()}.png)")
    if published := [each for each in PUBLISHED if each.suite == suite.name]:
        rows = [(each.what, f"{each.value:g} {each.unit}".strip(), each.of) for each in published]
        lines.append("Published:\n\n" + _table(("what", "figure", "where"), rows))
    if not of:
        lines.append("No run on GPUs yet.")
    lines += [_file(suite, file) for file in of]
    return "\n\n".join(lines)


def _file(suite: Suite, file: File) -> str:
    spread = "" if file.spread != LEAST_MOST else "; in parentheses least and most"
    lines = [f"{file.device}, {file.commit[:7] or 'commit unknown'}: `benchmarks/results/{file.name}`{spread}."]
    if rows := _times(file):
        lines.append(_table(("point", "call", "busy, ms", "plain, ms", "over FlashMoE"), rows))
    if (values := VALUES.get(suite.name)) and (said := values(file)):
        lines.append(said)
    if file.shared:
        lines.append(_SHARED)
    if clocks := _clocks(file):
        lines.append(clocks)
    if absent := file.absent():
        lines.append("Absent: " + "; ".join(f"{name} ({why})" for name, why in sorted(absent.items())) + ".")
    for point in file.without:
        lines.append(f"No figures of {point['name']}: {point.get('voided') or point['failed']}")
    return "\n\n".join(lines)


_SHARED = (
    "Two ranks shared the GPU, each with half of its multiprocessors: the suite has run, with checked results, but "
    "these are no figures of several GPUs."
)


def _times(file: File) -> list[tuple[str, ...]]:
    by_timer = {timer: {(each.point, each.call): each for each in file.times(timer)} for timer in ("busy", "plain")}
    rows = []
    for each in file.times():
        ours = by_timer[each.timer].get((each.point, "flashmoe"))
        ratio = f"{each.median / ours.median:.2f}" if ours and each.call != "flashmoe" else ""
        cells = [_cell(by_timer[timer].get((each.point, each.call))) for timer in ("busy", "plain")]
        rows.append((each.point, figures.NAMES.get(each.call, each.call), *cells, ratio))
    return rows


def _cell(time: Time | None) -> str:
    return f"{_short(time.median)} ({_short(time.lower)} to {_short(time.upper)})" if time else "-"


def _short(number: float) -> str:
    """A number with three significant digits; from 100 on, without decimals."""
    return f"{number:.0f}" if number >= 100 or number == int(number) == 0 else f"{number:#.3g}"


def _clocks(file: File) -> str:
    """A sentence about the clocks and the power while calls were timed; empty if they were not recorded."""
    seen = [point["clocks"] for point in file.points if point.get("clocks", {}).get("sm_mhz")]
    if not seen:
        return ""
    sm = [each["sm_mhz"]["median"] for each in seen]
    watts = [each["watts"]["max"] for each in seen if "watts" in each]
    power = f", at most {max(watts):.0f} W" if watts else ""
    return f"SM clock while calls were timed, medians of points: {min(sm):.0f} to {max(sm):.0f} MHz{power}."


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# ---- what suites have besides times ----------------------------------------------------------------------------------


def _memory(file: File) -> str:
    parts = []
    for point in file.points:
        rows = []
        for row in point["values"]["rows"]:
            if "model" in row:
                what, dropless = f"{row['model']}, M = {row['tokens_in_all']}", "-"
            else:
                what, dropless = f"{row['tokens']} tokens, {row['experts']} experts", _mib(row["dropless_bytes"])
            share = f"{row['bytes'] / row['published_bytes']:.0%}"
            rows.append((what, _mib(row["published_bytes"]), _mib(row["bytes"]), share, dropless))
        head = ("sizes", "published, MiB", "ours, MiB", "of published", "ours, dropless, MiB")
        parts.append(f"{point['name']} (a rank of {point['sizes']['ranks']}):\n\n" + _table(head, rows))
    return "\n\n".join(parts)


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f}"


def _metric(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _metrics(file: File) -> str:
    names = ("registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes", "seconds", "cubin_bytes", "lines")
    rows = [
        (
            point["name"],
            *(_metric(point["values"].get(name)) for name in names),
        )
        for point in file.points
    ]
    head = (
        "kernel (SwiGLU)",
        "registers",
        "stack, bytes",
        "spill stores",
        "spill loads",
        "nvcc, s",
        "cubin, bytes",
        "lines",
    )
    said = "nvcc's seconds are those of the machine that is named, whatever else it had to do."
    return _table(head, rows) + f"\n\n{said}"


def _versions(file: File) -> str:
    """A table of the packages that were measured as baselines, with their versions."""
    rows = {}
    for point in file.points:
        if versions := point["values"]["versions"]:
            said = ", ".join(f"{name} {version}" for name, version in versions.items())
            rows[figures.NAMES.get(point["sizes"]["baseline"], point["sizes"]["baseline"]), said] = None
    return _table(("baseline", "packages"), rows)


def _stragglers(file: File) -> str:
    rows = [
        (point["name"], figures.NAMES.get(call, call), *(f"{of[f'slowdown_{each}']:.2f}" for each in ("median", "p95")))
        for point in file.points
        for call, of in point["values"].items()
    ]
    return _table(("point", "call", "slowest over fastest rank, median", "95th percentile"), rows)


def _placements(file: File) -> str:
    """For experts that are chosen unevenly: the rows of the fullest rank, divided by the mean of all ranks."""
    rows = [
        (point["name"], row["placement"], f"{row['spread_of_load']:.3f}", f"{row['fullest']:.2f}")
        for point in file.points
        for row in point["values"]["rows"]
    ]
    return _table(("point", "placement", "standard deviation of loads", "fullest rank, of the mean"), rows)


def _splits(file: File) -> str:
    rows = [
        (point["name"], f"EP {row['expert_parallel']} x TP {row['tensor_parallel']}", f"{row['difference']:.1e}")
        for point in file.points
        for row in point["values"]["rows"]
    ]
    return _table(("point", "split", "apart from the first split"), rows)


def _counts(file: File) -> str:
    rows = [
        (point["name"], figures.NAMES.get(name, name), f"{count:g}")
        for point in file.points
        for name, count in point["values"].items()
    ]
    return _table(("point", "call", "GPU operations"), rows)


def _api(file: File) -> str:
    rows = []
    for point in file.points:
        for name, each in point["values"].items():
            calls = ", ".join(f"{key} {count:g}" for key, count in each["by_name"].items())
            called = figures.NAMES.get(name, name)
            rows.append((point["name"], called, f"{each['calls']:g}", f"{each['us']:.3g}", calls))
    return _table(("point", "call", "API calls", "us of the host", "by name"), rows)


_SHARES = {
    "with_tasks": "processors with a task, of a traced call",
    "with_kernels": "a kernel running, from the call's start to its end",
    "sm_active": "SMs active, from the call's start to its end",
}


def _utilization(file: File) -> str:
    rows = [
        (point["name"], figures.NAMES.get(call, call), _SHARES[what], f"{share:.1%}")
        for point in file.points
        for what, shares in point["values"].items()
        for call, share in shares.items()
    ]
    return _table(("point", "call", "share of the time", ""), rows)


def _shared(file: File) -> str:
    rows = []
    for point in file.points:
        values = point["values"]
        if "in_all" in values:
            by_name = ", ".join(f"{key} {count}" for key, count in values["instructions"].items())
            rows.append((point["name"], f"{values['in_all']} in the code", by_name))
        elif "executed" in values:
            rows.append(
                (point["name"], "counted", ", ".join(f"{key} {each:g}" for key, each in values["executed"].items()))
            )
    return _table(("kernel", "instructions on shared memory", "by name"), rows) if rows else ""


def _phases(file: File) -> str:
    rows = []
    for point in file.points:
        phases = ", ".join(f"{name} {share:.0%}" for name, share in point["values"]["phases"].items())
        hidden = point["values"].get("hidden")
        exposed = f"{hidden['exposed']:.0%}" if hidden else "-"
        of_pytorch = point["values"].get("communication_of_pytorch")
        rows.append((point["name"], phases, f"{of_pytorch:.0%}" if of_pytorch else "-", exposed))
    head = (
        "point",
        "processors' time, of a traced call",
        "exchange of PyTorch's layer",
        "exposed of collectives' time",
    )
    return _table(head, rows)


def _decode(file: File) -> str:
    rows = [
        (point["name"], str(row["tokens"]), f"{row['us']:.3g}", f"{row['weights_tb_s']:.2f}", f"{row['of_read']:.2f}")
        for point in file.points
        for row in point["values"].get("rows", [])
    ]
    speeds = _table(("layer", "tokens", "us a layer", "weights, TB/s", "of a read's speed"), rows)
    return "\n\n".join(filter(None, (speeds, _figures(file))))


def _figures(file: File) -> str:
    rows = [
        (point["name"], name, f"{each:.4g}")
        for point in file.points
        for name, each in point["values"].get("figures", {}).items()
    ]
    return _table(("point", "figure", ""), rows) if rows else ""


def _soak(file: File) -> str:
    rows = []
    for point in file.points:
        values = point["values"]
        compared = str(values.get("compared", "not recorded"))
        of_these = f"{point['check']['error']:g}"
        rows.append((point["name"], str(values["calls"]), f"{values['seconds']:.1f}", compared, of_these))
    return _table(("point", "calls", "seconds", "calls compared", "of these, other bits"), rows)


VALUES: dict[str, Callable[[File], str]] = {
    "memory": _memory,
    "metrics": _metrics,
    "baselines": _versions,
    "launches": _counts,
    "trace-api": _api,
    "utilization": _utilization,
    "shared-memory": _shared,
    "stragglers": _stragglers,
    "breakdown": _phases,
    "parallelism": _splits,
    "imbalance": _placements,
    "decode": _decode,
    "soak": _soak,
    **dict.fromkeys(("step", "models", "faults"), _figures),
}


# ---- pictures --------------------------------------------------------------------------------------------------------


def _all_times(of: list[File]) -> list[tuple[File, Time]]:
    return [(file, time) for file in of for time in file.times()]


def _card(device: str) -> str:
    return device.removeprefix("NVIDIA ").partition(" ")[0]


def _by_size(x: str, label: str, title: Callable[[Time], str]) -> Drawer:
    """Makes a drawer of lines over the size `x`, with a panel for each title and device. Calls with fewer than two
    different sizes are left out."""

    def draw(path: Path, of: list[File]) -> bool:
        panels: dict[str, figures.Lines] = {}
        for file in of:
            chosen = panels_of(file.times(), title, lambda time: time.sizes[x])
            for name, lines in chosen.items():
                several = {call: line for call, line in lines.items() if len({at for at, _ in line}) > 1}
                if several:
                    panels[f"{name}, {_card(file.device)}"] = several
        if panels:
            figures.draw_lines(path, panels, label, "ms a call (slowest rank)", of)
        return bool(panels)

    return draw


def _ranks(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def _gpus(path: Path, of: list[File]) -> bool:
    """Draws latency, efficiency and throughput over the number of ranks. Files of the same device share panels."""
    times: dict[tuple[str, str], list[Time]] = {}
    for file, time in _all_times(of):
        if time.call in ("flashmoe", "pytorch", "gemms"):
            dtype = time.sizes.get("dtype", "bfloat16")
            shape = f"{time.sizes.get('shape', '')} {time.sizes['tokens']}, {dtype}, {_card(file.device)}"
            times.setdefault((shape, time.call), []).append(time)
    latency: dict[str, figures.Lines] = {}
    for (shape, call), line in times.items():
        if len({time.ranks for time in line}) < 2:
            continue
        latency.setdefault(f"latency, ms; {shape}", {})[call] = [(time.ranks, time) for time in line]
        two = next((time.median for time in line if time.ranks == 2), None)
        if two is not None and call != "gemms":
            scaled = [(time.ranks, _scaled(time, lambda ms, two=two: two / ms)) for time in line if time.ranks >= 2]
            latency.setdefault(f"efficiency, T(2) / T(N); {shape}", {})[call] = scaled
        if call != "gemms":
            rate = [(time.ranks, _scaled(time, lambda ms, time=time: time.sizes["tokens"] * time.ranks / ms / 1e3))
                    for time in line]  # fmt: skip
            latency.setdefault(f"Mtokens/s; {shape}", {})[call] = rate
    if latency:
        (said,) = [each for each in PUBLISHED if each.unit == "Mtokens/s"]
        rates = [title for title in latency if title.startswith("Mtokens/s")]
        published = dict.fromkeys(rates, (8.0, said.value, "FlashDMoE, float32, 8 H100"))
        figures.draw_lines(path, latency, "GPUs (N)", "", of, published)
    return bool(latency)


def _scaled(time: Time, how: Callable[[float], float]) -> Time:
    from dataclasses import replace

    lower, upper = sorted((how(time.lower), how(time.upper)))
    return replace(time, lower=lower, median=how(time.median), upper=upper)


def _bars_of_times(path: Path, of: list[File]) -> bool:
    """Draws a panel for each device and number of ranks, with a group of bars for each point."""
    panels: Panels = {}
    for file, time in _all_times(of):
        group = f"{time.ranks} ranks sharing one GPU" if file.shared else _ranks(time.ranks)
        title = f"{group}, {_card(file.device)}"
        point = time.point.removesuffix(f" x{time.ranks}")
        panels.setdefault(title, {}).setdefault(point, {})[time.call] = time
    if panels:
        figures.draw_bars(path, panels, "ms a call (slowest rank)", of)
    return bool(panels)


def _beside_published(suite: str, x: str, title: str, bars: Callable[[dict[str, Any]], Panels]) -> Drawer:
    """Makes a drawer of the bars that the function `bars` returns for the points of all files, followed by a panel with
    the values that papers state for the suite."""

    def draw(path: Path, of: list[File]) -> bool:
        panels: Panels = {}
        for file in of:
            for point in file.points:
                for name, groups in bars(point).items():
                    panels.setdefault(f"{name}, {_card(file.device)}", {}).update(groups)
        if panels:
            said = {each.what: figures.Published(each.value) for each in PUBLISHED if each.suite == suite}
            figures.draw_bars(path, {**panels, title: {"": said}}, x, of)
        return bool(panels)

    return draw


def _launched(point: dict[str, Any]) -> Panels:
    of = point["name"].removesuffix(f" x{point['ranks']}")
    return {_ranks(point["ranks"]): {of: dict(point["values"])}}


def _utilized(point: dict[str, Any]) -> Panels:
    percent = {
        what.replace("_", " "): {call: 100 * share for call, share in by_call.items()}
        for what, by_call in point["values"].items()
    }
    return {point["name"]: percent}


def _over_ours(path: Path, of: list[File]) -> bool:
    """Draws for each baseline its time divided by that of FlashMoE at the same point."""
    panels: Panels = {}
    for file in of:
        medians = {(each.point, each.call): each.median for each in file.times()}
        for point in file.points:
            sizes, call = point["sizes"], point["sizes"]["baseline"]
            title = f"{sizes['shape']}, {sizes['tokens']} tokens, {_ranks(point['ranks'])}, {_card(file.device)}"
            ratio = medians[point["name"], call] / medians[point["name"], "flashmoe"]
            panels.setdefault(title, {}).setdefault("", {})[call] = ratio
    if panels:
        figures.draw_bars(path, panels, "times FlashMoE's call", of)
    return bool(panels)


def _memory_picture(path: Path, of: list[File]) -> bool:
    panels: Panels = {}
    for point in of[0].points:
        groups: dict[str, dict[str, Any]] = {}
        for row in point["values"]["rows"]:
            model = row.get("model")
            label = f"{model}\nM = {row['tokens_in_all']}" if model else f"{row['tokens']}, E{row['experts']}"
            of_row = {"flashmoe": row["bytes"] / 2**20}
            whose = "COMET" if model else "FlashDMoE"
            groups[label] = {**of_row, whose: figures.Published(row["published_bytes"] / 2**20)}
        panels[f"{point['name']}: ranks; tokens a rank, experts"] = groups
    figures.draw_bars(path, panels, "MiB of a rank", of)
    return True


def _shape_and_ranks(time: Time) -> str:
    return f"{time.sizes.get('shape', 'small')}, {_ranks(time.ranks)}"


DRAWERS: dict[str, Drawer] = {
    "memory": _memory_picture,
    "tokens": _by_size("tokens", "tokens a GPU (T)", _shape_and_ranks),
    "gpus": _gpus,
    "experts": _by_size("experts", "experts (E)", lambda time: _ranks(time.ranks)),
    "topk": _by_size("top_k", "experts a token (K)", lambda time: f"E {time.sizes['experts']}, {_ranks(time.ranks)}"),
    "baselines": _over_ours,
    "launches": _beside_published(
        "launches",
        "GPU operations of a forward pass",
        "published, 2 GPUs, 64 experts (FlashDMoE, table 1.1)",
        _launched,
    ),
    "utilization": _beside_published(
        "utilization", "% of the time", "published, 2 A100: SM cycles with a warp in flight", _utilized
    ),
    **dict.fromkeys(
        (
            "precision",
            "stragglers",
            "breakdown",
            "parallelism",
            "imbalance",
            "split",
            "decode",
            "training",
            "step",
            "fp8",
            "shared",
            "models",
        ),
        _bars_of_times,
    ),
}
