"""The file of measured profiles, and which of them a context takes."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flashmoe.contexts.limits import engine_return_mode
from flashmoe.errors import FlashMoEError
from flashmoe.tuning import profiles
from flashmoe.tuning.knobs import stored_profile
from flashmoe.tuning.profiles import Record, Setting

SETTING = Setting("Fake", 4, "bfloat16", 2048, 768, 128, 8, 8192)
RECORD = Record(SETTING, "swiglu", {"gemm1_lag": 264, "return_mode": "reduced"}, 1.25, 1.5)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch) -> Iterator[Path]:
    """A file of profiles of a test's own, in a folder that is not there yet."""
    path = tmp_path / "folder" / "profiles.json"
    monkeypatch.setenv("FLASHMOE_PROFILES", str(path))
    monkeypatch.setattr(profiles, "_noticed", set())
    before = os.umask(0o022)  # these tests write files of their own, to which nobody else may write
    yield path
    os.umask(before)


def record(tokens: int, raster: int, **changes) -> Record:
    """A record that the tests recognise by its raster."""
    return replace(RECORD, setting=replace(SETTING, tokens=tokens), profile={"raster": raster}, **changes)


# ---- the file --------------------------------------------------------------------------------------------


def test_what_is_stored_is_read(file):
    assert profiles.read() == []
    other = replace(RECORD, setting=replace(SETTING, ranks=1), profile={})
    assert profiles.store(RECORD) == profiles.store(other) == file
    assert profiles.read() == [RECORD, other]


def test_a_record_takes_the_place_of_its_like():
    profiles.store(record(8192, 2), record(4096, 4), record(8192, 8, activation="gelu"))
    profiles.store(record(8192, 16))
    assert profiles.read() == [record(4096, 4), record(8192, 8, activation="gelu"), record(8192, 16)]


def test_where_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASHMOE_PROFILES")
    monkeypatch.setenv("FLASHMOE_CACHE", str(tmp_path / "cache"))
    assert profiles.path() == tmp_path / "cache" / "profiles.json"


WRITER = """
import sys
from dataclasses import replace
from flashmoe.tuning import profiles
who = int(sys.argv[1])
setting = profiles.Setting("Fake", who, "bfloat16", 64, 64, 8, 2, 1)
for i in range(10):
    profiles.store(profiles.Record(replace(setting, tokens=1 << i), "relu", {"raster": who}, 1.0, 1.0))
"""


def test_many_processes_store_at_once():
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(who)]) for who in (1, 2, 3, 4)]
    seen = [0]
    while any(writer.poll() is None for writer in writers):
        seen.append(len(profiles.read()))  # raises if a file is half written
    assert [writer.wait() for writer in writers] == [0] * 4
    assert seen == sorted(seen)
    found = {(each.setting.ranks, each.setting.tokens) for each in profiles.read()}
    assert found == {(who, 1 << i) for who in (1, 2, 3, 4) for i in range(10)}


def edited(change) -> str:
    """The text of a file that has RECORD, after `change` has changed its content."""
    content = json.loads(profiles.store(RECORD).read_text())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: "", "JSONDecodeError"),
        (lambda: edited(id)[:100], "JSONDecodeError"),
        (lambda: "[]", "TypeError"),
        (lambda: "{}", "KeyError: 'version'"),
        (lambda: edited(lambda c: c.update(version=2)), "expected version 1, got 2"),
        (lambda: edited(lambda c: c["profiles"][0].pop("top_k")), "KeyError: 'top_k'"),
        (lambda: edited(lambda c: c["profiles"][0].update(colour="red")), "unexpected keyword argument 'colour'"),
        (lambda: edited(lambda c: c["profiles"][0].update(hidden="wide")), "hidden: expected int, got 'wide'"),
        (lambda: edited(lambda c: c["profiles"][0].update(profile=[])), r"profile: expected dict, got \[\]"),
        (lambda: edited(lambda c: c["profiles"][0].update(tokens=100)), "tokens: expected a power of two, got 100"),
        (lambda: '{"version": ' * 100_000, "nested too deeply"),
        (lambda: '{"version": 1, "version": 1, "profiles": []}', "the name 'version' twice"),
        (lambda: '{"version": 1, "profiles": %s}' % ("9" * 5000), "digits"),
        (lambda: edited(lambda c: c.update(version=True)), "expected version 1, got True"),
        (lambda: edited(lambda c: c.update(version=1.0)), "expected version 1, got 1.0"),
        (lambda: edited(lambda c: c["profiles"][0].update(ranks=True)), "ranks: expected int, got True"),
        (
            lambda: edited(lambda c: c["profiles"][0].update(ranks=0)),
            r"ranks: expected an integer in \[1, 1024\], got 0",
        ),
        (lambda: edited(lambda c: c["profiles"][0].update(hidden=-1)), "hidden: expected an integer in"),
        (lambda: edited(lambda c: c["profiles"][0].update(experts=10**4000)), "experts: expected an integer in"),
        (lambda: edited(lambda c: c["profiles"][0].update(tokens=2**21)), "tokens: expected an integer in"),
        (lambda: edited(lambda c: c["profiles"][0].update(milliseconds=float("nan"))), "milliseconds: expected a time"),
        (lambda: edited(lambda c: c["profiles"][0].update(milliseconds=-1.0)), "milliseconds: expected a time"),
        (
            lambda: edited(lambda c: c["profiles"][0].update(built_in_milliseconds=float("inf"))),
            "built_in_milliseconds: expected a time, got inf",
        ),
        (lambda: edited(lambda c: c["profiles"][0].update(profile={"raster": [1]})), r"got \[1\] of 'raster'"),
        (lambda: edited(lambda c: c["profiles"][0].update(profile={"raster": True})), "got True of 'raster'"),
        (lambda: edited(lambda c: c["profiles"][0].update(device="a" * 10**6, ranks=0)), "ranks: expected"),
        (lambda: edited(lambda c: c["profiles"][0].update(hidden="a" * 10**6)), "hidden: expected int, got 'aaa"),
        (lambda: edited(lambda c: c["profiles"][0].update({"a" * 10**6: 1})), "unexpected keyword argument 'aaa"),
        (lambda: edited(lambda c: c["profiles"][0].update({"\ud800\n": 1})), r"keyword argument '\\ud800\\n'"),
    ],
)
def test_a_file_that_cannot_be_read(file, make, reason):
    file.parent.mkdir(exist_ok=True)
    text = make()
    file.write_text(text)
    for use in (profiles.read, lambda: profiles.lookup(SETTING), lambda: profiles.store(RECORD)):
        with pytest.raises(FlashMoEError, match=f"profiles: cannot read {file} .*{reason}.*; remove it") as raised:
            use()
        assert str(raised.value).isprintable() and len(str(raised.value)) < 2000
    assert file.read_text() == text  # it is left for its user to look at


def test_a_file_that_claims_terabytes(file):
    profiles.store(RECORD)
    os.truncate(file, 2**43)
    for use in uses():
        with pytest.raises(FlashMoEError, match=f"profiles: cannot read {file} .*{2**43} bytes, which are more than"):
            use()


def test_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHMOE_PROFILES", str(tmp_path / "file" / "profiles.json"))
    with pytest.raises(FlashMoEError, match=r"profiles: cannot write to .*/file: .*; set FLASHMOE_PROFILES"):
        profiles.store(RECORD)


def uses() -> list:
    return [profiles.read, lambda: profiles.lookup(SETTING), lambda: profiles.store(RECORD)]


def test_a_folder_to_which_others_can_write(file):
    profiles.store(RECORD)
    file.parent.chmod(0o777)
    for use in uses():
        with pytest.raises(FlashMoEError, match=f"^profiles: {file.parent}: expected a folder .*, mode 0777; see"):
            use()


def test_a_file_to_which_others_can_write(file):
    profiles.store(RECORD)
    file.chmod(0o664)
    for use in uses():
        with pytest.raises(FlashMoEError, match=f"^profiles: {file}: expected a file .*, mode 0664; chmod go-w"):
            use()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: path.mkdir(), "a folder"),
        (os.mkfifo, "a pipe"),
        (lambda path: path.symlink_to("elsewhere"), "a symbolic link"),
    ],
    ids=["folder", "pipe", "link"],
)
@pytest.mark.timeout(60)
def test_what_is_no_file(file, make, found):
    file.parent.mkdir()
    make(file)
    for use in uses():
        with pytest.raises(FlashMoEError, match=f"^profiles: {file}: expected a regular file, found {found}; remove"):
            use()


def test_no_name_is_written_through_a_link(file, tmp_path):
    file.parent.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (file.parent / "profiles.json.tmp").symlink_to(precious)
    assert profiles.store(RECORD) == file and profiles.read() == [RECORD]
    lock = file.parent / "profiles.json.lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "made by another")
    with pytest.raises(FlashMoEError, match=f"^profiles: {lock}: expected a regular file, found a symbolic link"):
        profiles.store(RECORD)
    assert precious.read_text() == "as it was" and not (tmp_path / "made by another").exists()


@pytest.mark.timeout(60)
def test_a_lock_that_is_not_released(file, monkeypatch):
    monkeypatch.setattr(profiles, "LOCK_SECONDS", 0.5, raising=False)
    file.parent.mkdir()
    with open(file.parent / "profiles.json.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start = time.monotonic()
        holder = f"(process {os.getpid()}|another process)"
        expected = rf"^profiles: waited 0\.5 s for the lock {file}\.lock, which {holder} holds; end that process"
        with pytest.raises(FlashMoEError, match=expected):
            profiles.store(RECORD)
        assert time.monotonic() - start < 30


def test_a_folder_that_another_user_has_made(second_user, monkeypatch):
    file = second_user.place / "squatted" / "profiles.json"
    monkeypatch.setenv("FLASHMOE_PROFILES", str(file))
    second_user.does(lambda: profiles.store(RECORD))
    for use in uses():
        with pytest.raises(FlashMoEError, match=f"^profiles: {file.parent}: .* found one of user {second_user.uid}, "):
            use()


# ---- lookup ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (2, 2), (3, 4), (4, 4), (4097, 8192), (65536, 65536)])
def test_bucket(tokens, expected):
    assert profiles.bucket(tokens) == expected


def test_an_exact_bucket_is_found_without_a_notice(caplog):
    caplog.set_level(logging.INFO, "flashmoe")
    profiles.store(record(4096, 4), record(8192, 8), record(16384, 16))
    assert profiles.lookup(replace(SETTING, tokens=5000)) == {"raster": 8}
    assert profiles.lookup(SETTING) == {"raster": 8}
    assert caplog.records == []


@pytest.mark.parametrize(("tokens", "raster"), [(1, 2), (200, 2), (300, 32), (1024, 32), (60000, 32)])
def test_else_the_nearest_one_with_a_notice(caplog, tokens, raster):
    """Of two equally near ones, the larger is taken: 4096 instead of 64, for 257 to 512 tokens."""
    caplog.set_level(logging.INFO, "flashmoe")
    profiles.store(record(64, 2), record(4096, 32))
    for _ in range(2):
        assert profiles.lookup(replace(SETTING, tokens=tokens)) == {"raster": raster}
    (said,) = caplog.messages
    assert f"none measured for Fake x 4, H 2048, I 768, E 128, K 8, bfloat16, {profiles.bucket(tokens)} tokens" in said
    assert f"taking that for {64 if raster == 2 else 4096} " in said


@pytest.mark.parametrize(
    "other",
    [
        {"device": "Another"},
        {"ranks": 2},
        {"dtype": "float16"},
        {"hidden": 4096},
        {"intermediate": 512},
        {"experts": 64},
        {"top_k": 4},
    ],
    ids=str,
)
def test_else_none(caplog, other):
    caplog.set_level(logging.INFO, "flashmoe")
    profiles.store(RECORD)
    assert profiles.lookup(replace(SETTING, **other)) == {}
    assert caplog.records == []


def test_of_several_activations_the_last_one_stored():
    profiles.store(record(8192, 2, activation="gelu"), record(8192, 4, activation="relu"))
    assert profiles.lookup(SETTING) == {"raster": 4}
    profiles.store(record(8192, 8, activation="gelu"))
    assert profiles.lookup(SETTING) == {"raster": 8}


def test_a_stored_return_mode_is_the_context_s():
    profiles.store(RECORD)
    assert stored_profile(SETTING) == ({"gemm1_lag": 264}, "reduced")


@pytest.mark.parametrize(
    ("ranks", "top_k", "intermediate", "reduces"),
    [
        (1, 8, 768, False),
        (2, 8, 768, False),  # measured: direct is faster
        (4, 8, 768, False),  # the link takes as long as the GEMMs: measured, direct is still faster
        (8, 8, 768, False),
        (8, 8, 512, True),
        (4, 8, 512, False),
        (8, 8, 2048, False),
        (32, 1, 64, False),  # one row a token, either way
    ],
)
def test_the_cuda_engine_reduces_what_the_link_would_bound(ranks, top_k, intermediate, reduces):
    mode = engine_return_mode("cuda", "auto", ranks, top_k, intermediate)
    assert mode == ("reduced" if reduces else "direct")
    assert engine_return_mode("cpu", "auto", ranks, top_k, intermediate) == "auto"


# ---- what comes with the package -------------------------------------------------------------------------


def test_shipped_profiles_can_be_used():
    assert profiles.shipped()
    for each in profiles.shipped():
        assert each.setting.ranks > 1 and each.setting == each.setting.in_bucket()
        assert each.milliseconds <= each.built_in_milliseconds
        profile, mode = stored_profile(each.setting)
        assert profile | ({} if mode is None else {"return_mode": mode}) == each.profile


def test_a_shipped_profile_counts_where_nothing_is_stored(monkeypatch):
    monkeypatch.setattr(profiles, "shipped", lambda: (RECORD,))
    assert profiles.lookup(replace(SETTING, tokens=5000)) == RECORD.profile
    assert profiles.lookup(replace(SETTING, tokens=2048)) == {}  # the shipped one is for other numbers of tokens
    profiles.store(record(2048, 8))
    assert profiles.lookup(SETTING) == {"raster": 8}
