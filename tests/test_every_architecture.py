"""Every model of the installed Transformers that has experts, small and random, against eager experts.

CI runs a third of the models. The number of commits decides which third, so that three commits in a row test all
models. The reason of each skipped test says which third was run. FLASHMOE_ARCHITECTURES=0, 1 or 2 chooses another
third, and FLASHMOE_ARCHITECTURES=all runs all models, as `make test-integrations` does. A run of all models writes a
record to the folder that FLASHMOE_ARCHITECTURES_RECORD names; `python tools/architectures_page.py` makes the table of
docs/models.md from that record.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest

transformers = pytest.importorskip("transformers")

import architectures_page  # noqa: E402
import torch  # noqa: E402
from against_eager import outcome  # noqa: E402
from flashmoe.bench.origin import cpu_model, head, output, result_path, write  # noqa: E402
from small_models import MODELS, classes_of_experts, folders, is_on_interface  # noqa: E402

THIRDS = 3
COMMITS = int(output("git", "rev-list", "--count", "HEAD") or 0)
CHOSEN = os.environ.get("FLASHMOE_ARCHITECTURES") or str(COMMITS % THIRDS)
REFUSED = {
    "inkling2": "Inkling2Experts._apply_gate",
    "inkling2_loop": "Inkling2LoopExperts._apply_gate",
    "muse_spark": "MuseSparkExperts.has_post_expert_norm",
}
"""By folder: what the refusal names, for models on Transformers' experts interface that FlashMoE does not compute. For
a model that is not on the interface, the refusal names the class of its experts."""


def chosen():
    """The folders of all models. Models of the other thirds are marked to be skipped."""
    if CHOSEN not in ("all", *map(str, range(THIRDS))):
        raise ValueError(f"FLASHMOE_ARCHITECTURES: expected 0, 1, 2 or all, got {CHOSEN!r}")
    reason = f"third {CHOSEN} of the models runs; FLASHMOE_ARCHITECTURES=0, 1, 2 or all chooses"
    skipped = [CHOSEN not in ("all", str(at % THIRDS)) for at in range(len(folders()))]
    marks = {True: [pytest.mark.skip(reason=reason)], False: []}
    return [pytest.param(folder, marks=marks[skip]) for folder, skip in zip(folders(), skipped, strict=True)]


@pytest.fixture(scope="module")
def record():
    """By folder, what each model's test has found. After a run of all models, it is written as a record."""
    found = {}
    yield found
    place = os.environ.get("FLASHMOE_ARCHITECTURES_RECORD")
    if place and list(found) == folders():
        origin = {"device": f"{cpu_model()} x0", "commit": head(), "command": "make in-transformers"}
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        for earlier in Path(place).glob("*.json"):  # a record of all models replaces every earlier one
            earlier.unlink()
        path = Path(place) / result_path("architectures", cpu_model(), 0).name
        write(path, {**origin, **versions, "models": found})


@pytest.mark.parametrize("folder", chosen())
def test_a_model_computes_what_it_does_with_eager_experts(folder, tmp_path, record, one_thread):
    said = outcome(folder, tmp_path)
    named = [REFUSED[folder]] if folder in REFUSED else [] if is_on_interface(folder) else classes_of_experts(folder)
    assert ("refused" in said) == bool(named), said.get("refused")
    assert not named or said["refused"].startswith(tuple(named))
    record[folder] = said


def test_files_with_experts_are_found():
    """Files with experts are found by the names of their classes. Each file that uses the experts interface is among
    the files that are found."""
    on_interface = [path.parent.name for path in MODELS.glob("*/modeling_*.py") if is_on_interface(path.parent.name)]
    assert len(on_interface) > 20 and set(on_interface) <= set(folders())
    assert classes_of_experts("mixtral") == ["MixtralExperts", "MixtralSparseMoeBlock"]


def test_the_page_says_what_the_record_says():
    page, found = architectures_page.PAGE.read_text(), json.loads(architectures_page.record().read_text())
    assert page == architectures_page.with_table(page), "run python tools/architectures_page.py"
    if found["transformers"] == transformers.__version__:
        assert list(found["models"]) == folders(), "run make test-integrations"
