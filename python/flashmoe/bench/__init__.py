"""``flashmoe bench``: suites that regenerate the tables and figures of FlashDMoE and COMET, and some of our own.

A suite (`suites/`) says which points there are, and measures one of them in every rank of a group. All else is done
here once: processes of ranks (`group.py`), the inputs and the check of a layer (`layer.py`), timers and clocks
(`run.py`, `clocks.py`), what a run leaves (`store.py`), the budget and where to go on (`runner.py`), and baselines in
the same processes (`baselines/`). The programs of ``benchmarks/`` travel with the package, and suites call their
functions (`programs.py`). `tools/performance_page.py` makes docs/performance.md from what is left.
"""
