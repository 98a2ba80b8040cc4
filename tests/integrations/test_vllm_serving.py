"""vLLM's HTTP server with the shipped checkpoint: what it generates with the plugin and without."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import flashmoe
import pytest
from flashmoe.quantize import quantize_checkpoint

pytestmark = pytest.mark.timeout(900)  # two servers start within the first test

pytest.importorskip("vllm", reason="there is no vLLM: see `make test-integrations`")

CHECKPOINT = str(resources.files("flashmoe") / "assets" / "tiny-qwen3-moe")
PROMPTS = [
    "It was a truth which",
    "Elizabeth could not but",
    "The evening was spent in",
    "My dear Mr. Darcy,",
    "A walk to the village, and",
]
TOKENS = 200
LOG = f"FlashMoE {flashmoe.__version__} computes the unquantised experts"
LEFT = "FlashMoE leaves vLLM as it is; with FLASHMOE_VLLM=1 it computes the experts"
TOLERANCE = 1e-4
"""The most by which log-probabilities may differ, in float32. If the experts' results are off by 2^-8, a rounding to
bfloat16, log-probabilities differ by more: a test shows that."""
PATIENCE = 280.0
"""Seconds for a server's start, most of which vLLM's compiler takes."""
AT_ONCE = 8
"""Requests that a server is asked at a time, where many are asked."""
GROUPS = {
    "tensor parallel": ["--tensor-parallel-size", "2"],
    "tensor and expert parallel": ["--tensor-parallel-size", "2", "--enable-expert-parallel"],
    "data and expert parallel": ["--data-parallel-size", "2", "--enable-expert-parallel"],
}
"""Options of a server with two ranks."""
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "nobind"}
"""Without it, vLLM puts no more than one rank on each NUMA node."""


def requests() -> list[tuple[str, int]]:
    """200 beginnings of 2 to 40 words, in a random order, each with a number of tokens."""
    random = Random(1)
    words = " ".join(PROMPTS).split()
    return [(" ".join(random.choices(words, k=random.randint(2, 40))), random.randint(1, 50)) for _ in range(200)]


@dataclass(frozen=True)
class Server:
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def complete(self, prompts: list[str], tokens: int = TOKENS) -> list[dict[str, Any]]:
        """Greedy texts of so many tokens, and the tokens' log-probabilities."""
        asked = {
            "model": "tiny",
            "prompt": prompts,
            "max_tokens": tokens,
            "temperature": 0.0,
            "logprobs": 1,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            choices = json.load(answer)["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    def complete_all(self) -> list[dict[str, Any]]:
        """The answers to `requests`, in their order; `AT_ONCE` of them are asked at a time."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(lambda request: self.complete([request[0]], request[1])[0], requests()))


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def start(folder: Path, port: int, *options: str, **variables: str) -> subprocess.Popen[bytes]:
    """A server. Further plugins may lie in `folder`; what vLLM compiles does."""
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(folder),
        **CORES,
        **variables,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", CHECKPOINT]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "512"]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def serving(folder: Path, *options: str, **variables: str) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = start(folder, port, *options, **variables)
    try:
        deadline = time.monotonic() + PATIENCE
        while not is_ready(url):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, f"no answer in {PATIENCE} s: " + (folder / "log").read_text()
            time.sleep(0.5)
        yield Server(url, folder / "log", process)
    finally:
        end(process)


class Expected(NamedTuple):
    """What vLLM generates by itself, with one rank."""

    texts: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    """To `requests`."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Expected:
    with serving(tmp_path_factory.mktemp("plain")) as server:
        found = Expected(server.complete(PROMPTS), server.complete_all())
        log = server.log.read_text()
    assert LOG not in log and log.count(LEFT) == 1
    assert all(len(choice["logprobs"]["tokens"]) == TOKENS for choice in found.texts)
    assert len({choice["text"] for choice in found.texts}) == len(PROMPTS)
    return found


@pytest.fixture(scope="module")
def expected(plain) -> list[dict[str, Any]]:
    return plain.texts


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """With the plugin."""
    with serving(tmp_path_factory.mktemp("plugin"), FLASHMOE_VLLM="1") as server:
        yield server


def difference(found: list[dict[str, Any]], expected: list[dict[str, Any]], tokens: int = TOKENS) -> float:
    """The largest between the log-probabilities of the first tokens."""
    return max(
        abs(one - other)
        for pair in zip(found, expected, strict=True)
        for one, other in zip(*(each["logprobs"]["token_logprobs"][:tokens] for each in pair), strict=True)
    )


def test_the_server_generates_what_vllm_does(expected, server):
    found = server.complete(PROMPTS)
    assert LOG in server.log.read_text()
    assert [choice["text"] for choice in found] == [choice["text"] for choice in expected]
    assert difference(found, expected) <= TOLERANCE


def test_requests_one_by_one_and_together_are_alike(expected, server):
    for choice, prompt in zip(expected, PROMPTS, strict=True):
        (alone,) = server.complete([prompt], 32)
        assert alone["logprobs"]["tokens"] == choice["logprobs"]["tokens"][:32]


@pytest.fixture(scope="module", params=GROUPS)
def group(request, tmp_path_factory) -> Iterator[Server]:
    """With the plugin and two ranks."""
    with serving(tmp_path_factory.mktemp("group"), *GROUPS[request.param], FLASHMOE_VLLM="1") as server:
        yield server


def test_two_ranks_generate_what_one_does(expected, group):
    found = group.complete(PROMPTS)
    log = group.log.read_text()
    assert LOG in log and LEFT not in log
    assert [choice["text"] for choice in found] == [choice["text"] for choice in expected]
    assert difference(found, expected) <= TOLERANCE


def test_two_ranks_answer_200_requests_of_any_length(plain, group):
    found = group.complete_all()
    assert [choice["text"] for choice in found] == [choice["text"] for choice in plain.answers]
    assert max(difference([one], [other]) for one, other in zip(found, plain.answers, strict=True)) <= TOLERANCE


@pytest.mark.parametrize("how", list(GROUPS)[1:])
def test_a_killed_rank_is_named_and_the_server_ends(how, tmp_path):
    with serving(tmp_path, *GROUPS[how], "--enforce-eager", FLASHMOE_VLLM="1") as server:
        (rank,) = [each for each in descendants(server.process.pid) if re.search("Worker.*_EP1", name_of(each))]
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(server.complete, PROMPTS, 400)
            time.sleep(1.0)  # so that it is at work; if not, the engine notices it all the same
            os.kill(rank, signal.SIGKILL)
            with pytest.raises((urllib.error.HTTPError, ConnectionError)):
                answer.result(timeout=60)
        assert server.process.wait(60) is not None
        log = server.log.read_text()
    engine = "EngineCore" if how.startswith("tensor") else "EngineCore_DP1"
    worker = 1 if how.startswith("tensor") else 0
    assert re.search(rf"\({engine} pid=\d+\) ERROR .* Worker proc VllmWorker-{worker} died unexpectedly", log)


def descendants(pid: int) -> list[int]:
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [each for child in children for each in descendants(child)]


def name_of(pid: int) -> str:
    """The title that vLLM gives the process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


MUTANT = """
from flashmoe.integrations.vllm.experts import FlashMoEExperts


def register():
    right = FlashMoEExperts.apply

    def wrong(self, *arguments, topk_weights, **others):
        return right(self, *arguments, topk_weights=topk_weights * (1 + 2**-8), **others)

    if FlashMoEExperts.apply.__name__ != "wrong":
        FlashMoEExperts.apply = wrong
"""


def test_what_the_plugin_computes_is_what_is_served(expected, tmp_path):
    """With weights that a second plugin makes wrong by 2^-8, log-probabilities are off by more than the tolerance."""
    (tmp_path / "mutant.py").write_text(MUTANT)
    metadata = tmp_path / "mutant-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mutant\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nmutant = mutant:register\n")
    with serving(tmp_path, "--enforce-eager", FLASHMOE_VLLM="1") as server:
        found = server.complete(PROMPTS)
        assert LOG in server.log.read_text()
    assert difference(found, expected, tokens=1) > 2 * TOLERANCE


def test_a_model_with_experts_in_fp8(expected, tmp_path):
    """Its linear layers stay as they are. The first tokens are as likely as in float32, but for what FP8 and bfloat16
    round."""
    quantize_checkpoint(CHECKPOINT, tmp_path / "fp8")
    options = ("--model", str(tmp_path / "fp8"), "--dtype", "bfloat16", "--enforce-eager")
    with serving(tmp_path, *options, FLASHMOE_VLLM="1") as server:
        found = server.complete(PROMPTS, 1)
        assert LOG.replace("the unquantised experts", "the experts in FP8") in server.log.read_text()
    assert TOLERANCE < difference(found, expected, tokens=1) < 0.2


def test_experts_quantised_otherwise_are_refused_by_layer_and_kind(tmp_path):
    process = start(tmp_path, 0, "--quantization", "fp8", "--dtype", "bfloat16", FLASHMOE_VLLM="1")
    try:
        assert process.wait(PATIENCE) != 0
    finally:
        end(process)
    log = (tmp_path / "log").read_text()
    said = (
        "InvalidArgument: model.layers.0.mlp.experts: expected experts that are not quantised, or in FP8, got "
        "Fp8PerTensorOnlineMoEMethod; "
    )
    assert said + "FlashMoE does not compute these experts in vLLM" in log
