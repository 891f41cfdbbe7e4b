# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KvextConnector behind ``vllm serve`` gives the responses of an engine without a connector.

Arguments of requests mean the same in every form that an endpoint accepts.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Iterator
from operator import sub
from pathlib import Path
from typing import Any

import pytest
import requests
import tiny_models
from http_served import CHAT, COMPLETIONS, Client, hit_tokens, serving
from support.scenarios import connector, processes, scenario_of
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.connector import PROMPT_LENGTHS
from support.scenarios.engine import POOL_BLOCKS, REPLY_TOKENS, VOCABULARY_TOKENS
from support.scenarios.processes import ADAPTIVE, CPU, NO_PREFIX_CACHING, PLUGIN_OFF, Plan
from support.upstream_version import IS_SINCE_0_30
from tiny_models import WINDOW_TOKENS

SCENARIOS = ("turns", "large_storm")
BLOCK_TOKENS = CPU.block_tokens
CONNECTOR = processes.connector(host_memory_gib=0.25, segments={"sink": [2], "selector": "heads"})[
    "kv_transfer_config"
]
"""Segments are on. This changes nothing for requests that name no segments."""
NUM_BLOCKS = POOL_BLOCKS // 3 if IS_SINCE_0_30 else POOL_BLOCKS
"""The pool's size. With more blocks, the storm preempts no request on vLLM 0.30."""
COMMON_ARGUMENTS = (
    *("--enforce-eager", "--dtype", "float32"),
    *("--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048"),
    # Prompts are computed in chunks. The storm needs more blocks than the pool has. The stores of
    # the turns do not, however slow the copies are.
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "128"),
    *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
    *("--no-disable-hybrid-kv-cache-manager", "--enable-prompt-tokens-details"),
    *("--kv-transfer-config", json.dumps(CONNECTOR)),
)
ONE, TWO = "prefix caching, adaptive", "two ranks, no prefix caching"
SERVERS = {
    ONE: (["--enable-prefix-caching"], {"VLLM_CPU_OMP_THREADS_BIND": "0", **ADAPTIVE}),
    TWO: (
        ["--no-enable-prefix-caching", "--tensor-parallel-size", "2"],
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
}
needs_two_cpus = pytest.mark.skipif(
    not {0, 1} <= os.sched_getaffinity(0), reason="the ranks run on CPUs 0 and 1"
)
of_one = pytest.mark.parametrize("client", [ONE], indirect=True)
on_both_paths = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCUMENT_TOKENS = 333
rng = random.Random(0)


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A server without plugin, connector and prefix caching."""
    plans = {"reference": Plan(tiny_model, SCENARIOS, engine=NO_PREFIX_CACHING)}
    return processes.serve(tmp_path_factory, plans, PLUGIN_OFF)["reference"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one token per word, and chats that are the words of their messages."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tiny_models.write("one window", tmp_path_factory.mktemp("model"))
    words = {f"t{token_id:03}": token_id for token_id in range(VOCABULARY_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t000"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t000",
        eos_token="t001",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[ONE, pytest.param(TWO, marks=needs_two_cpus)])
def client(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A client of a running server that has answered all scenarios."""
    arguments, environ = SERVERS[request.param]
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(model, [*COMMON_ARGUMENTS, *arguments], environ, log) as client:
        for scenario in SCENARIOS:
            scenario_of(connector, scenario)(client)
        yield client


def floor(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def random_tokens(num_tokens: int) -> list[int]:
    return [rng.randrange(100, 500) for _ in range(num_tokens)]


def test_every_response_is_that_of_an_engine_without_a_connector(
    client: Client, reference: Served
) -> None:
    report = client.report()
    assert len(report.labels) == 7
    report.check_equal(reference, report.labels)


def test_hits_end_at_the_last_row_unit(client: Client) -> None:
    report = client.report()
    assert report.hit_tokens("cold") == [0] * len(PROMPT_LENGTHS)
    assert report.hit_tokens("warm") == [floor(length - 1) for length in PROMPT_LENGTHS]
    assert report.hit_tokens("second turn") == [
        floor(length + REPLY_TOKENS - 1) for length in PROMPT_LENGTHS
    ]
    assert report.hit_tokens("forgotten") == [0]


def test_metrics_tell_what_came_from_host_memory(client: Client) -> None:
    name = "external_prefix_cache_hits_total"
    expected = sum(floor(length - 1) for length in PROMPT_LENGTHS)
    assert client.counted["warm"][name] - client.counted["cold"][name] == expected
    client.count_up("kvext_host_hit_tokens_total", client.read_counted()[name] - 1)
    counted = client.read_counted()
    assert counted["kvext_transfer_bytes_total.store"] > 0
    assert counted["kvext_transfer_bytes_total.load"] > 0
    assert counted["kvext_host_capacity_bytes"] > 0


def test_requests_were_preempted(client: Client) -> None:
    counted = client.read_counted()
    assert counted["num_preemptions_total"] > 0
    assert counted["kvext_host_swapped_requests_total"] > 0


def test_segments_are_stored_and_reused_by_name(client: Client) -> None:
    """A segment is reused exactly in its old place, but not elsewhere. The response says so."""
    question, document = random_tokens(21), random_tokens(203)
    stored = client.complete(document, 1, kvext_store_segment=True)
    assert stored["kv_transfer_params"] == {"kvext_stored_tokens": len(document)}
    client.count_up("kvext_blend_stored_segments_total")
    client.reset()  # The device also has the document, behind the sink.
    in_place, elsewhere = [2, *document, *question], [*question, *document, *question]
    answers = {}
    for name, prompt in (("in place", in_place), ("elsewhere", elsewhere)):
        first = len(prompt) - len(question) - len(document)
        segments = json.dumps([[first, first + len(document)]])
        blended = client.complete(prompt, REPLY_TOKENS, kvext_segments=segments)
        plain = client.complete(prompt, REPLY_TOKENS)
        assert plain["kv_transfer_params"] is None
        said = blended["kv_transfer_params"]
        assert said is not None, name
        assert sum(said.values()) == len(prompt), (name, said)
        head_tokens = 0 if name == "in place" else WINDOW_TOKENS - 1
        assert said["kvext_reused_tokens"] == len(document) - head_tokens
        answers[name] = [
            each["choices"][0]["logprobs"]["token_logprobs"] for each in (blended, plain)
        ]
    error = {name: max(map(abs, map(sub, *both))) for name, both in answers.items()}
    assert error["in place"] <= LOGPROB_TOLERANCE < 1e-2 < error["elsewhere"]


# Arguments of requests.


def ask(client: Client, path: str, prompt: list[int], **arguments: Any) -> dict[str, Any]:
    text = " ".join(f"t{token_id:03}" for token_id in prompt)
    asked = {COMPLETIONS: {"prompt": text}, CHAT: {"messages": [{"role": "user", "content": text}]}}
    response = client.post(path, {**asked[path], "max_tokens": 1, "vllm_xargs": arguments})
    assert response["usage"]["prompt_tokens"] == len(prompt)
    return response


def host_hit_tokens(client: Client, path: str, **hint: Any) -> tuple[int, float]:
    """The host hit of the second question about a document, and the number of pinned hints.

    Adaptive retention has taken these hints from the first question.
    """
    document = random_tokens(DOCUMENT_TOKENS)
    pinned = client.read_counted()["kvext_hints_pinned_total"]
    ask(client, path, document + random_tokens(150), **hint)
    pinned = client.read_counted()["kvext_hints_pinned_total"] - pinned
    wait_for_stores(client)
    client.reset()
    return hit_tokens(ask(client, path, document + random_tokens(150))), pinned


def wait_for_stores(client: Client) -> None:
    """Wait until all stores are reported. Reports come with steps."""
    deadline_s = time.monotonic() + 60
    before = -1.0
    while (stored := client.read_counted()["kvext_transfers_total.store"]) != before:
        assert time.monotonic() < deadline_s
        before = stored
        ask(client, COMPLETIONS, random_tokens(5))
        time.sleep(0.2)


@of_one
@on_both_paths
@pytest.mark.parametrize("form", ["[333]", " [333, 400] ", "333", 333])
def test_a_hint_is_taken_in_every_form(client: Client, path: str, form: Any) -> None:
    found, pinned = host_hit_tokens(client, path, kvext_checkpoint_tokens=form)
    assert found == floor(DOCUMENT_TOKENS)
    assert pinned == (2 if "400" in str(form) else 1)


@of_one
@on_both_paths
def test_without_a_hint_less_is_hit(client: Client, path: str) -> None:
    found, pinned = host_hit_tokens(client, path)
    assert found < floor(DOCUMENT_TOKENS) and not pinned


@of_one
@pytest.mark.vllm("<0.30")
def test_only_chats_take_lists(client: Client) -> None:
    """This is why the docs recommend the form of a text."""
    found, _ = host_hit_tokens(client, CHAT, kvext_checkpoint_tokens=[333])
    assert found == floor(DOCUMENT_TOKENS)
    with pytest.raises(requests.HTTPError, match="400"):
        ask(client, COMPLETIONS, random_tokens(5), kvext_checkpoint_tokens=[333])


@of_one
@on_both_paths
@pytest.mark.parametrize("truth", [True, "true", 1])
def test_a_segment_is_stored_and_named_in_every_form(client: Client, path: str, truth: Any) -> None:
    document = random_tokens(203)
    stored = ask(client, path, document, kvext_store_segment=truth)
    assert stored["kv_transfer_params"] == {"kvext_stored_tokens": len(document)}
    wait_for_stores(client)
    prompt = [*random_tokens(21), *document, *random_tokens(30)]
    said = ask(client, path, prompt, kvext_segments="[[21, 224]]")["kv_transfer_params"]
    assert said["kvext_reused_tokens"] == len(document) - (WINDOW_TOKENS - 1)


@of_one
@on_both_paths
def test_wrong_arguments_end_no_request_and_are_counted(client: Client, path: str) -> None:
    name = "kvext_blend_refusals_total.wrong_segments"
    before = client.read_counted()[name]
    for argument in ("kvext_checkpoint_tokens", "kvext_store_segment", "kvext_segments"):
        for wrong in ("[333", "{}", -1, 1.5, '"text"', "[[0, 200]]"):
            response = ask(client, path, random_tokens(40), **{argument: wrong})
            assert "kvext_reused_tokens" not in (response["kv_transfer_params"] or ())
    client.count_up(name, before)


@of_one
def test_the_server_has_every_metric_and_label_of_the_board(client: Client) -> None:
    """The board is ``examples/grafana.json``; see ``test_grafana_board``."""
    board = json.loads((EXAMPLES / "grafana.json").read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    variables = [each for each in board["templating"]["list"] if each["type"] == "query"]
    asked = [*(each["expr"] for each in targets), *(each["query"]["query"] for each in variables)]
    labels_of: dict[str, list[dict[str, str]]] = {}
    for sample in (sample for metric in client.metrics() for sample in metric.samples):
        labels_of.setdefault(sample.name, []).append(sample.labels)
    selectors = [found for each in asked for found in re.findall(r"(vllm:\w+)\{([^}]*)\}", each)]
    assert len(selectors) > len(board["panels"])
    for name, labels in selectors:
        series = labels_of.get(name, [])
        assert series, f"{name} is not at /metrics"
        wanted = dict(re.findall(r'(\w+)=~?"([^"]*)"', labels))
        assert wanted.keys() <= series[0].keys(), (name, wanted)
        constant = {label: value for label, value in wanted.items() if "$" not in value}
        assert any(constant.items() <= one.items() for one in series), (name, constant)
