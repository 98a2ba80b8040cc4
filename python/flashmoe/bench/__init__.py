"""``flashmoe bench``: suites that regenerate the tables and figures of FlashDMoE and COMET, and some of our own.

A suite (`suites/`) says which points there are, and measures one of them in every rank of a group. Everything else is
here once: ranks' processes (`group.py`), a layer's inputs and its check (`layer.py`, `expected.py`), timers and clocks
(`run.py`, `measure.py`, `clocks.py`), where a figure comes from (`origin.py`), the files of a run (`store.py`), the
budget and where a run continues (`runner.py`), and baselines in the same processes (`baselines/`, `floors.py`). What a
suite shares with a script of ``benchmarks/`` is a module here, which the script imports. A module that imports PyTorch
at its top is imported where it is used: `flashmoe bench --list` needs no PyTorch. `tools/performance_page.py` makes
docs/performance.md from the files of runs.
"""
