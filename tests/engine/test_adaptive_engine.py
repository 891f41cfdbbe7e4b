# SPDX-License-Identifier: Apache-2.0
"""Adaptive retention on the real engine: the same tokens, whatever is hit, evicted or hinted."""

from __future__ import annotations

import pytest
from serve_workload import BLOCK_TOKENS, DOCUMENT_TOKENS, SYSTEM_PROMPT_TOKENS
from served import INTERVAL, LOGPROB_TOLERANCE, Serve, Served

ADAPTIVE = {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"}
SETTINGS = {
    "adaptive": ADAPTIVE,
    "adaptive and a grid": {**ADAPTIVE, INTERVAL: "128"},
}
DOCUMENT_BOUNDARY_TOKENS = DOCUMENT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
CORRUPTED = ("window corrupted", "full corrupted")


@pytest.fixture(
    params=["adaptive", pytest.param("adaptive and a grid", marks=pytest.mark.main_version)]
)
def setting(request: pytest.FixtureRequest, serve: Serve) -> Served:
    return serve(SETTINGS[request.param])


@pytest.fixture
def adaptive(serve: Serve) -> Served:
    return serve(ADAPTIVE)


def test_outputs_are_those_without_prefix_caching(setting: Served, uncached: Served) -> None:
    labels = [label for label in setting.labels if label not in CORRUPTED]
    assert len(labels) > 10
    for label in labels:
        replies = [answer.reply for answer in setting.answers(label)]
        assert replies == [answer.reply for answer in uncached.answers(label)], label
        assert setting.logprob_error(label, uncached) <= LOGPROB_TOLERANCE, label


@pytest.mark.parametrize("label", CORRUPTED)
def test_a_wrong_cached_block_shows_in_the_outputs(
    setting: Served, uncached: Served, label: str
) -> None:
    """The control of the test above: it can fail, and for either kind of group."""
    assert setting.hit_tokens(label) == [384]
    assert setting.logprob_error(label, uncached) > 100 * LOGPROB_TOLERANCE


def test_requests_were_preempted_and_checkpoints_evicted(setting: Served) -> None:
    assert setting.report["num_preemptions"] > 0
    assert setting.report["retention"]["checkpoints_evicted"] > 0


@pytest.mark.parametrize("label", ["sent again", "second turn", "edited", "intact cache"])
def test_hits_at_least_what_dense_caching_hits(setting: Served, dense: Served, label: str) -> None:
    for found, expected in zip(setting.hit_tokens(label), dense.hit_tokens(label), strict=True):
        assert found >= expected >= SYSTEM_PROMPT_TOKENS


def test_every_branch_hits_what_dense_caching_hits(adaptive: Served, dense: Served) -> None:
    labels = [f"document, question {number}" for number in (1, 2, 3)]
    expected = [[0], [DOCUMENT_BOUNDARY_TOKENS], [DOCUMENT_BOUNDARY_TOKENS]]
    assert [dense.hit_tokens(label) for label in labels] == expected
    assert [adaptive.hit_tokens(label) for label in labels] == expected


def test_second_request_hits_what_the_first_has_named(adaptive: Served) -> None:
    label = "hinted document, question {}".format
    assert [adaptive.hit_tokens(label(number)) for number in (1, 2, 3)] == [
        [0],
        [DOCUMENT_BOUNDARY_TOKENS],
        [DOCUMENT_BOUNDARY_TOKENS],
    ]


def test_keeps_what_dense_caching_keeps_while_there_is_room(
    adaptive: Served, dense: Served
) -> None:
    kept = adaptive.kept_blocks("empty cache", "window")
    assert min(kept) > 0
    assert kept == dense.kept_blocks("empty cache", "window")


def test_reset_prefix_cache_forgets_everything(setting: Served) -> None:
    assert setting.report["was_reset"] is True
    assert setting.hit_tokens("empty cache") == setting.hit_tokens("emptied cache") == [0]


def test_metrics_count(adaptive: Served) -> None:
    metrics = adaptive.report["retention"]
    for name in ("checkpoints_kept", "junctions_pinned", "hints_pinned"):
        assert metrics[name] > 0, metrics
    assert metrics["lost_tokens"] > 0, metrics
    assert adaptive.report["prefix_cache_hits"] > 0
