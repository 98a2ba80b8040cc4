"""``flashmoe bench``: suites that regenerate the tables and figures of FlashDMoE and COMET, and some of our own.

A suite (`suites/`) says which points there are, and measures one of them in every rank of a group. Everything else is
here once: ranks' processes (`group.py`), a layer's inputs and its check (`layer.py`), timers and clocks (`run.py`,
`clocks.py`), the files of a run (`store.py`), the budget and where a run continues (`runner.py`), and baselines in the
same processes (`baselines/`). The programs of ``benchmarks/`` are part of the package, and suites call their functions
(`programs.py`). `tools/performance_page.py` makes docs/performance.md from the files of runs.
"""
