"""What the commands print on a terminal. Apart from ratios and sums, no figures are computed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from ..account import PARTS, Account
from ..contexts.memory import Comparison, MemoryPlan, TrainingCost, format_bytes
from ..placement import Placement, local_experts
from ..report import TASK_KINDS, CallReport, GroupReport
from ..simulation import Simulated
from .console import console, count
from .verify import Verdict
from .workload import Workload

CHART_HEIGHT = 6
CHART_WIDTH = 64
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ASCII_EIGHTHS = " ..::++##"
_NOTHING = {"0", "-", format_bytes(0)}
_RANK_COLOURS = ("blue", "dark_orange", "green", "magenta", "cyan", "yellow", "red", "bright_black")


def show_workload(workload: Workload) -> None:
    """The configuration of a run."""
    layer, counts = workload.layer, [len(part) for part in workload.tokens]
    mode = workload.limits["return_mode"]
    tokens = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    normalised = "renormalized" if layer.renormalize else "not renormalized"
    weights = workload.limits["weight_dtype"]
    types = layer.dtype.name if weights == layer.dtype.name else f"{layer.dtype.name}, experts {weights}"
    rows = {
        "layer": workload.title,
        "sizes": f"H {layer.hidden}, I {layer.intermediate}, E {layer.experts}, K {layer.top_k} "
        f"({normalised}), {layer.activation}, {types}",
        "group": f"{count(len(counts), 'rank')} of {tokens} tokens, {workload.engine} engine, return {mode}",
        "data": "; ".join(workload.notes),
    }
    if layer.options or layer.choice_bias is not None:
        options = [name if value is True else f"{name} {value}" for name, value in layer.options.items()]
        biases = [
            name
            for name in ("router_bias", "choice_bias", "gate_up_bias", "down_bias")
            if getattr(layer, name) is not None
        ]
        rows["rule"] = ", ".join(options + biases)
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)


def show_expert_load(group: GroupReport, placement: Sequence[int]) -> None:
    """A chart with a column for each expert, or for a few neighbouring experts if there are many. A column has the
    colour of the rank that holds its (first) expert."""
    load, owners = group.expert_load, np.asarray(placement)
    blocks = _ASCII_EIGHTHS if console.options.ascii_only else _EIGHTHS
    share = -(-len(load) // CHART_WIDTH)  # experts per column
    starts = range(0, len(load), share)
    columns = [load[start : start + share].max() for start in starts]
    width = max(1, min(3, CHART_WIDTH // len(columns)))
    top = max(*columns, 1)
    console.print()
    console.print(Text("Expert load", style="bold"), Text(f"({count(group.pairs, 'token-expert pair')})"))
    for row in reversed(range(CHART_HEIGHT)):
        label = f"{top:,.0f}" if row == CHART_HEIGHT - 1 else "0" if row == 0 else ""
        line = Text.assemble((f"{label:>8} ", "dim"))
        for start, column in zip(starts, columns, strict=True):
            eighths = int(np.clip(np.ceil(column / top * CHART_HEIGHT * 8 - row * 8), 0, 8))
            bar = blocks[eighths] * (width - (width > 1)) + " " * (width > 1)
            line.append(bar, style=_RANK_COLOURS[owners[start] % len(_RANK_COLOURS)])
        console.print(line)
    per_column = "an expert" if share == 1 else f"the busiest of {share} experts"
    legend = Text(f"{'':9}a column: {per_column} (0 to {len(load) - 1}), in the colour of rank")
    for rank in sorted(set(placement))[: len(_RANK_COLOURS)]:
        legend.append(f" {rank}", style=_RANK_COLOURS[rank])
    console.print(legend)
    console.print(
        f"{'':9}busiest: expert {load.argmax()} with {load.max():,}, {group.load_imbalance:.2f} times "
        f"the mean of {load.mean():,.1f}; least {load.min():,}"
    )


def show_ranks(reports: Sequence[CallReport], group: GroupReport) -> None:
    """Three tables, a row per rank: what it computed, what it sent, where its time went."""
    _show_table(
        "Tasks",
        ["rank", "tokens", *TASK_KINDS, "tiles", "rows/tile"],
        [
            [
                rank,
                f"{report.tokens:,}",
                *(f"{report.tasks.get(kind, 0):,}" for kind in TASK_KINDS),
                f"{report.tiles:,}",
                f"{report.tile_rows / report.tiles:.1f}" if report.tiles else "-",
            ]
            for rank, report in enumerate(reports)
        ],
    )
    traffic = [
        [
            rank,
            f"{report.rows_sent:,}",
            f"{report.return_rows_sent:,}",
            format_bytes(report.bytes_sent),
            f"{report.padded_rows:,}",
            format_bytes(report.padded_bytes),
            f"{report.padded_bytes / report.bytes_sent:.1f}x" if report.padded_bytes and report.bytes_sent else "-",
        ]
        for rank, report in enumerate(reports)
    ]
    if len(reports) > 1:
        head = ["rank", "rows out", "rows back", "sent", "padded rows", "padded bytes", "padded/sent"]
        title = "Sent to other ranks"
        if any(report.padded_rows for report in reports):
            title += ", and what a padded all-to-all would send"
        _show_table(title, head, traffic)
    phases = [kind for kind in reports[0].phase_ns if kind != "idle" and any(r.phase_ns[kind] for r in reports)]
    _show_table(
        "Milliseconds (phases: summed over the processors)",
        ["rank", "wall", *phases, "processors", "idle"],
        [
            [
                rank,
                f"{report.wall_ns / 1e6:.2f}",
                *(f"{report.phase_ns.get(phase, 0) / 1e6:.2f}" for phase in phases),
                report.processors,
                f"{report.idle_share:.0%}",
            ]
            for rank, report in enumerate(reports)
        ],
    )
    rate = group.tokens / group.wall_ns * 1e9 if group.wall_ns else 0.0
    console.print(
        f"{count(group.tokens, 'token')} in {group.wall_ns / 1e6:.2f} ms ({rate:,.0f} tokens/s), "
        f"{reports[0].return_mode} return, {group.idle_share:.0%} idle"
    )


def show_files(files: Mapping[Path, str]) -> None:
    """The files written, one line each, with what is in them."""
    console.print()
    for file, hint in files.items():
        console.print(Text(f"wrote {file}"), Text(f"({hint})", style="dim"), soft_wrap=True)


def show_accounts(of_call: Sequence[Account]) -> None:
    """Where the processors' time of each rank went in a call, percent."""
    console.print()
    wall = " / ".join(f"{each.wall_ns / 1000:,.1f}" for each in of_call)
    name = "Backward pass" if of_call[0].backward else "Forward pass"
    title = f"{name}, {wall} us; percent of the time of {count(of_call[0].processors, 'processor')}"
    console.print(Text(title, style="bold"))
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for each in of_call:
        table.add_column("" if len(of_call) == 1 else f"rank {each.rank}", justify="right", header_style="dim")
    table.add_column("", style="dim")
    shares = [each.shares() for each in of_call]
    for part, meaning in [*PARTS.items(), ("uncovered", "between two spans")]:
        if part == "uncovered":
            table.add_section()
        if part == "uncovered" or any(each.get(part) for each in shares):
            table.add_row(part, *(f"{each.get(part, 0) * 100:.2f}" for each in shares), meaning)
    console.print(table)


def show_overhead(overhead: Mapping[str, float], clock_error_us: Sequence[float]) -> None:
    """How much longer a traced call takes, and how exact times of several ranks are."""
    console.print()
    console.print(
        f"traced {overhead['traced_ms']:.4f} ms, untraced {overhead['untraced_ms']:.4f} ms: x {overhead['ratio']:.3f} "
        f"(medians of {overhead['pairs']}, in turn)"
    )
    if any(clock_error_us):
        errors = ", ".join(f"{each:.2f}" for each in clock_error_us)
        console.print(f"clocks: within {errors} us of this machine's")


def show_verdict(verdict: Verdict) -> None:
    """PASS or FAIL, with the figures that say why."""
    if verdict.misrouted:
        console.print(f"{count(verdict.misrouted, 'token')} routed to experts that are not their top-k")
    comparison = "<=" if verdict.error <= verdict.bound else "is not <="
    console.print(
        Text("PASS", style="bold green") if verdict.passed else Text("FAIL", style="bold red"),
        f"error {verdict.error:.2e} {comparison} bound {verdict.bound:.2e}",
    )
    console.print(Text("relative Frobenius norm, against float64; the bound is what rounding explains", style="dim"))
    if verdict.tokens < verdict.of_tokens:
        console.print(
            Text(
                f"result of {verdict.tokens:,} of {verdict.of_tokens:,} tokens, those of as many experts as the host "
                "computes in a moment; routing of all",
                style="dim",
            )
        )


def show_memory(plan: MemoryPlan, described: str) -> None:
    """The totals of a memory plan."""
    console.print(Text(f"{count(plan.ranks, 'rank')} x {plan.max_tokens:,} tokens, {described}", style="bold"))
    console.print(
        f"per rank {format_bytes(plan.total_bytes)}; heaps of all ranks "
        f"{format_bytes(plan.ranks * plan.heap_bytes)}; the caller's weights, input and output not counted"
    )
    if plan.kept_bytes:
        each = plan.kept_bytes / plan.max_tokens
        console.print(
            f"for gradients: {format_bytes(each)} per layer and token, {format_bytes(plan.kept_bytes)} per layer"
            + (f"; {format_bytes(plan.pass_bytes)} in a backward pass" if plan.pass_bytes else "")
        )


def show_memory_terms(plan: MemoryPlan) -> None:
    """Every term of a memory plan, largest first, with its formula and purpose."""
    regions = [("heap", "mapped by the other ranks"), ("workspace", "private to the rank")]
    if plan.kept_bytes:
        regions.append(("kept", "by each layer's call until its backward pass; ranks with even loads"))
    if plan.pass_bytes:
        regions.append(("pass", "a backward pass, until it ends, besides"))
    if plan.call_bytes:
        regions.append(("call", "a call that keeps, until it ends, besides"))
    for region, meaning in regions:
        console.print()
        console.print(Text(f"{region}, per rank ({meaning})", style="bold"))
        table = Table(box=None, pad_edge=False)
        table.add_column("term", no_wrap=True)
        table.add_column("bytes", justify="right", no_wrap=True)
        table.add_column("formula", no_wrap=True)
        table.add_column("what for")
        terms = [term for term in plan.terms if term.region == region]
        for term in sorted(terms, key=lambda term: -term.bytes):
            cells = (term.name, format_bytes(term.bytes), term.formula, term.why)
            table.add_row(*(Text(cell) for cell in cells))
        total = sum(term.bytes for term in terms)
        table.add_section()
        table.add_row("total", format_bytes(total), style="bold")
        console.print(table)


def show_training_costs(costs: Sequence[TrainingCost]) -> None:
    """The ways to have what gradients need, side by side."""
    console.print()
    console.print(Text("for gradients, per rank; a step is both passes", style="bold"))
    table = Table(box=None, pad_edge=False)
    columns = ("kept by a layer", "of the heap", "in a backward pass", "rows sent", "rows returned", "products a step")
    for name in ("way", *columns):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=name == "way")
    for cost in costs:
        sizes = (format_bytes(each) for each in (cost.kept_bytes, cost.heap_bytes, cost.pass_bytes))
        table.add_row(cost.way, *sizes, f"{cost.sent} x", f"{cost.returned} x", str(cost.products))
    console.print(table)


def show_balance(placed: Sequence[tuple[Placement, np.ndarray]]) -> None:
    """What each rank holds and has to compute, by default and as balanced. `placed` has for both the placement and the
    ranks' loads [R]."""
    (default, before), (balanced, after) = placed
    rows = [
        [
            rank,
            len(local_experts(default, rank)),
            f"{before[rank]:,.0f}",
            len(local_experts(balanced, rank)),
            f"{after[rank]:,.0f}",
        ]
        for rank in range(len(after))
    ]
    _show_table("Experts and load of each rank", ["rank", "contiguous", "load", "balanced", "load"], rows)
    fullest = [load.max() / load.mean() for load in (before, after)]
    console.print(f"fullest rank: {fullest[0]:.2f} times the mean by default, {fullest[1]:.2f} as balanced")


def show_comparisons(rows: Iterable[Comparison], ranks: int) -> None:
    """The published totals of FlashDMoE beside the CUDA engine's."""

    def mib(count: float) -> str:
        return f"{count / 2**20:,.2f}"

    head = ["tokens", "experts", "FlashDMoE", "capacity factor 1", "of FlashDMoE's", "dropless"]
    cells = [
        [
            f"{row.max_tokens:,}",
            row.experts,
            mib(row.published_bytes),
            mib(row.bounded.total_bytes),
            f"{row.bounded.total_bytes / row.published_bytes:.0%}",
            mib(row.dropless.total_bytes),
        ]
        for row in rows
    ]
    _show_table(f"MiB of a rank, heap and workspace, with {count(ranks, 'rank')}", head, cells)
    console.print(
        Text(
            "FlashDMoE: table 6.2. Tokens of a rank, of 4 KiB each (H 2,048, bfloat16); I 2,048, K 1, direct return",
            style="dim",
        )
    )


def _show_table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table of right-aligned cells. Columns without values are left out, because not every engine counts
    everything."""
    table = Table(box=None, pad_edge=False)
    columns = [(name, cells) for name, *cells in zip(head, *rows, strict=True)]
    counted = [column for column in columns if column[0] == "rank" or set(column[1]) - _NOTHING]
    for name, _ in counted:
        table.add_column(name, justify="right", header_style="dim")
    for row in zip(*(cells for _, cells in counted), strict=True):
        table.add_row(*map(str, row))
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def show_simulated(model: str, nic_gb_s: float, call: Simulated) -> None:
    """A simulated call."""
    ranks = call.machines * call.gpus
    group = f"{count(call.machines, 'machine')} of {count(call.gpus, 'GPU')}, {call.tokens} tokens each"
    rows = {
        "simulated": f"{model}, {group}" + (f", {nic_gb_s:g} GB/s a network interface" if call.machines > 1 else ""),
        "call": f"{call.call_us / 1e3:.3f} ms, the slowest of {count(ranks, 'rank')}",
        "tasks": f"from {call.first_task_us:.0f} until {call.last_task_us:.0f} us; thread blocks compute for "
        f"{call.busy_us:.0f}",
        "exposed": f"{call.exposed_us / 1e3:.3f} ms of communication, {call.exposed_us / call.call_us:.0%} of the call",
        "NVLink": f"{call.nvlink_bytes / 1e6:.1f} MB sent by a GPU",
        "network": f"{call.nic_bytes / 1e6:.1f} MB in {count(call.nic_messages, 'message')} sent by a GPU",
    }
    if call.machines > 1:
        rows["returns"] = "reduced; a row crosses the network once to a machine, whose sum for it comes back"
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)
