"""``flashmoe bench``: suites that regenerate the tables and figures of FlashDMoE and COMET, and some of our own.

A suite (`suites/`) lists its points (single measurements), and measures one of them in every rank of a group. What all
suites use lies in this folder: ranks' processes (`group.py`), a layer's inputs and its check (`layer.py`,
`expected.py`), timers and clocks (`run.py`, `measure.py`, `clocks.py`), where a figure comes from (`origin.py`), the
files of a run (`store.py`), the time budget and which points are still to be measured (`runner.py`), and baselines in
the same processes (`baselines/`, `floors.py`). What a suite shares with a script of ``benchmarks/`` is a module here,
which the script imports. A module that imports PyTorch at its top is imported only inside functions, so that
`flashmoe bench --list` needs no PyTorch. `tools/performance_page.py` makes docs/performance.md from the files of runs.
"""
