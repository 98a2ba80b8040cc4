"""The promises that tools/gpu_evidence/promises.py lists are on the pages that it names, and their tests exist."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from gpu_evidence.promises import PROMISES, TOPICS, Promise

ROOT = Path(__file__).resolve().parents[1]


@cache
def words_of(page: Path) -> str:
    """The page's text, with one space for each run of white space."""
    return " ".join(page.read_text().split())


@cache
def functions_of(file: Path) -> frozenset[str]:
    return frozenset(each.name for each in ast.parse(file.read_text()).body if isinstance(each, ast.FunctionDef))


def fault_of_test(test: str) -> str | None:
    """What is wrong with a name of a test."""
    name, named, function = test.partition("::")
    file = ROOT / name
    if not name.startswith("tests/") or not file.is_file():
        return f"{test}: there is no such file"
    if named and (file.suffix != ".py" or function not in functions_of(file)):
        return f"{test}: the file defines no such function"
    return None


def faults(promises: Sequence[Promise]) -> Iterator[str]:
    """What is wrong with single promises, and what two promises have in common that they may not."""
    for each in promises:
        if " ".join(each.quote.split()) != each.quote or each.quote not in words_of(ROOT / each.page):
            yield f"{each.says}: {each.page} does not say: {each.quote}"
        yield from filter(None, map(fault_of_test, each.tests))
        yield from (f"{each.says}: {test} twice" for test, count in Counter(each.tests).items() if count > 1)
    for what, named in (
        ("says", Counter(each.says for each in promises)),
        ("quotes", Counter((each.page, each.quote) for each in promises)),
    ):
        yield from (f"two promises' {what}: {name}" for name, count in named.items() if count > 1)


def test_the_pages_say_it_and_the_tests_are_there() -> None:
    assert list(faults(PROMISES)) == []


def test_every_file_of_gpu_tests_shows_something() -> None:
    named = {test.partition("::")[0] for each in PROMISES for test in each.tests}
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert len(files) > 30 and files - named == set()


def test_topics_have_titles_of_their_own_and_promises() -> None:
    assert len({topic.title for topic in TOPICS}) == len(TOPICS)
    assert all(topic.promises for topic in TOPICS)


GOOD = PROMISES[0]


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        (GOOD._replace(quote="words that no page has"), "does not say: words that no page has"),
        (GOOD._replace(quote=GOOD.quote + " "), "does not say"),
        (GOOD._replace(page="README.md"), "README.md does not say"),
        (GOOD._replace(tests=("tests/test_of_nothing.py",)), "tests/test_of_nothing.py: there is no such file"),
        (GOOD._replace(tests=("README.md",)), "README.md: there is no such file"),
        (GOOD._replace(tests=("tests/test_promises.py::test_of_nothing",)), "defines no such function"),
        (GOOD._replace(tests=("tests/cpp/test_types.cpp::main",)), "defines no such function"),
        (GOOD._replace(tests=("tests/test_promises.py",) * 2), "tests/test_promises.py twice"),
    ],
)
def test_a_planted_fault_is_found(planted: Promise, fault: str) -> None:
    (found,) = faults([planted])
    assert fault in found


def test_a_promise_twice_is_found() -> None:
    assert len(list(faults([GOOD, GOOD]))) == 2
    assert len(list(faults([GOOD, GOOD._replace(says="Another sentence.")]))) == 1
