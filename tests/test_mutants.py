"""The mutants of tools/mutate.py fit the code as it is now. (CI does not run the mutants themselves.)"""

from __future__ import annotations

from pathlib import Path

import mutate
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("mutant", mutate.MUTANTS, ids=lambda mutant: mutant.edge)
def test_a_mutant_changes_one_place(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
