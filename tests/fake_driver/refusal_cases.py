"""Calls that a rank of a group cannot begin: the host's part in them."""

from __future__ import annotations

import flashmoe
from fake_gpu import SIZES, E, H, I, arguments, driver, on_gpu
from fake_group import on_ranks, pretend, weights_of

WRONG = {"x": on_gpu(10, H + 8)}


def said_by(rank, ranks, name, environment, cubin, timeout, calls):
    """The error of each of `calls`: ``.`` is a right call, ``!`` has an x of another width, ``c`` too, while a graph is
    captured. Then, whether the host has written to the device in the last call."""
    pretend([rank], cubin, environment)
    settings = {**SIZES, "timeout": timeout, "name": name, "rank": rank, "ranks": ranks}
    with flashmoe.Context(engine="cuda", device=rank, **settings) as made:
        given = arguments(10, x=on_gpu(10, H), router=on_gpu(E, H), **weights_of(len(made.local_experts()), H, I))
        told = []
        for each in calls:
            driver.fake_log()
            driver.fake_capture(each == "c")
            try:
                flashmoe.moe(made, **given | ({} if each == "." else WRONG))
                told.append("")
            except flashmoe.FlashMoEError as error:
                told.append(f"{type(error).__name__}: {error}")
            driver.fake_capture(0)
        return told, "write" in driver.fake_log().decode()


def test_ranks_that_refuse_alike_go_on(cubin):
    for told, _ in on_ranks(said_by, [(cubin, 5.0, ".!!.")] * 2):
        assert [each[:18] for each in told] == ["", "InvalidArgument: x", "InvalidArgument: x", ""]


def test_who_refuses_alone_names_who_does_not_come(cubin):
    """Rank 1 makes its calls, but its fake kernel never writes that rank 1 has left the refused call."""
    (told, _), _ = on_ranks(said_by, [(cubin, 1.0, ".!.."), (cubin, 1.0, "....")])
    assert told[1].startswith("InvalidArgument: x: expected [")
    assert told[2].startswith("PeerTimeout: rank 1 holds up call 2: ")
    assert told[2].endswith("; rank 0 waited 1 s for rank 1 to leave call 2, which was refused")
    assert told[3] == "GroupError: context: an earlier call failed on this group; close it and make a new one"


def test_nothing_is_told_while_a_graph_is_captured(cubin):
    """The refused call does not count as one: the other ranks do not hear of it, and the capture may go on."""
    for told, wrote in on_ranks(said_by, [(cubin, 5.0, ".c")] * 2):
        assert told[1].startswith("InvalidArgument: x: expected [")
        assert not wrote


def heard_by(rank, ranks, name, environment, cubin):
    """What the rank is told in each of seven calls. The kernels of calls 1, 3 and 5 find that rank 1 refused calls."""
    pretend([rank], cubin, environment)
    settings = {**SIZES, "timeout": 5.0, "name": name, "rank": rank, "ranks": ranks}
    with flashmoe.Context(engine="cuda", device=rank, **settings) as made:
        given = arguments(10, x=on_gpu(10, H), router=on_gpu(E, H), **weights_of(len(made.local_experts()), H, I))
        news = {1: (1, 1), 3: (2, 3), 5: (0, 5)}
        told = []
        for call in range(1, 8):
            driver.fake_refusal(*news.get(call, (0, 0)))
            try:
                flashmoe.moe(made, **given)
                told.append("")
            except flashmoe.GroupError as error:
                told.append(str(error))
        return told


def test_others_hear_of_all_that_was_refused(cubin):
    """The rank's next call raises the error of the refused calls, once. That next call is launched all the same."""
    first = "rank 1 refused call 1: x: too wide"
    several = "rank 1 refused call 2: x: too wide; later calls were refused, too, up to call 3"
    lost = "a rank refused call 5; its reason is lost, since the host had not read an earlier one"
    assert on_ranks(heard_by, [(cubin,)] * 2) == [["", first, "", several, "", lost, ""]] * 2
