# SPDX-License-Identifier: Apache-2.0
"""Retention on the real engine: the same tokens, reuse where it is due, and fewer blocks kept."""

from __future__ import annotations

import pytest
from serve_workload import BLOCK_TOKENS
from served import INTERVAL, LOGPROB_TOLERANCE, PLUGIN_OFF, WINDOW_TOKENS, Served, start

from vllm_ascend_kvext.features import DEFAULTS
from vllm_ascend_kvext.settings import DISABLE_VARIABLE

CHECKPOINT_TOKENS = 128
SETTINGS = {
    "stock": PLUGIN_OFF,
    "unset": {},
    "interval 0": {INTERVAL: "0"},
    f"interval {CHECKPOINT_TOKENS}": {INTERVAL: f"{CHECKPOINT_TOKENS}"},
}
TAIL_BLOCKS = -(-(WINDOW_TOKENS - 1) // BLOCK_TOKENS)
UNTOUCHED = ("first turn", "sent again", "second turn", "edited", "storm", "after the storm")


ON_EVERY_VERSION = ("stock", "interval 0")
"""The others start two more engines, and say nothing about the version that these do not."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in ON_EVERY_VERSION else pytest.mark.main_version)
        for name in SETTINGS
    ]
)
def setting(request, serve) -> Served:
    return serve(SETTINGS[request.param])


@pytest.fixture
def latest_only(serve) -> Served:
    return serve(SETTINGS["interval 0"])


@pytest.fixture
def checkpoints(serve) -> Served:
    return serve(SETTINGS[f"interval {CHECKPOINT_TOKENS}"])


@pytest.mark.parametrize("label", [*UNTOUCHED, "empty cache", "intact cache", "emptied cache"])
def test_outputs_are_those_without_prefix_caching(setting, uncached, label):
    replies = [answer.reply for answer in setting.answers(label)]
    assert replies == [answer.reply for answer in uncached.answers(label)]
    assert setting.logprob_error(label, uncached) <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("kind", ["window", "full"])
def test_a_wrong_cached_block_shows_in_the_outputs(setting, uncached, kind):
    """The control of the test above: it can fail, and for either kind of group."""
    assert setting.hit_tokens(f"{kind} corrupted") == [384]
    assert setting.logprob_error(f"{kind} corrupted", uncached) > 100 * LOGPROB_TOLERANCE


def test_outputs_depend_on_the_prompt(uncached):
    replies = [tuple(answer.reply) for answer in uncached.answers("first turn")]
    assert len(set(replies)) == len(replies)
    assert all(len(set(reply)) > len(reply) // 2 for reply in replies)


def test_requests_were_preempted_and_chunked(setting):
    assert setting.report["num_preemptions"] > 0
    assert min(answer.prompt_tokens for answer in setting.answers("first turn")) > 128


@pytest.mark.parametrize("label", ["sent again", "second turn", "edited", "intact cache"])
def test_interval_0_hits_what_dense_caching_hits(latest_only, dense, label):
    assert latest_only.hit_tokens(label) == dense.hit_tokens(label)
    assert min(dense.hit_tokens(label)) >= 320


def test_interval_0_keeps_no_branch_of_a_first_prompt(latest_only, dense):
    assert dense.hit_tokens("first turn") == [0, 320, 320, 320]
    assert latest_only.hit_tokens("first turn") == [0, 0, 0, 0]


@pytest.mark.main_version
def test_checkpoints_let_a_first_prompt_branch(checkpoints):
    reused = 320 // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS
    assert checkpoints.hit_tokens("first turn") == [0, reused, reused, reused]


def test_interval_0_keeps_two_tails_where_dense_caching_keeps_all(latest_only, dense):
    assert dense.kept_blocks("empty cache", "window") == [26] * 5
    assert max(latest_only.kept_blocks("empty cache", "window")) <= 2 * TAIL_BLOCKS
    assert min(latest_only.kept_blocks("empty cache", "window")) >= TAIL_BLOCKS


@pytest.mark.main_version
def test_checkpoints_keep_one_tail_more_each(checkpoints, latest_only):
    num_checkpoints = 400 // CHECKPOINT_TOKENS
    for kept, least in zip(
        checkpoints.kept_blocks("empty cache", "window"),
        latest_only.kept_blocks("empty cache", "window"),
        strict=True,
    ):
        assert least < kept <= (2 + num_checkpoints) * TAIL_BLOCKS


def test_full_groups_stay_dense(setting):
    assert setting.kept_blocks("empty cache", "full") == [26]


def test_reset_prefix_cache_forgets_everything(setting):
    assert setting.report["was_reset"] is True
    assert setting.hit_tokens("empty cache") == setting.hit_tokens("emptied cache") == [0]


def test_unset_means_stock(serve, dense):
    unset = serve({DISABLE_VARIABLE: ",".join(feature.name for feature in DEFAULTS)})
    assert unset.report["wrapped"] == []
    assert unset.report["asked"] == dense.report["asked"]


def test_interval_wraps_the_core_once_asked_for(latest_only):
    assert latest_only.report["wrapped"]


def test_async_scheduler(serve, latest_only, uncached):
    """The CPU platform switches async scheduling off; its scheduler can be had by name."""
    served = serve(
        {INTERVAL: "0"},
        ("chat", "storm"),
        scheduler_cls="vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    )
    for label in UNTOUCHED:
        assert served.logprob_error(label, uncached) <= LOGPROB_TOLERANCE
    for label in ("first turn", "sent again", "second turn", "edited"):
        assert served.hit_tokens(label) == latest_only.hit_tokens(label)


def test_engine_core_in_its_own_process(serve, latest_only, uncached):
    served = serve({INTERVAL: "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, ("chat",))
    assert any(
        line.startswith("(EngineCore") and "retention" in line for line in served.log.splitlines()
    )
    for label in served.labels:
        assert served.logprob_error(label, uncached) <= LOGPROB_TOLERANCE
        assert served.hit_tokens(label) == latest_only.hit_tokens(label)


@pytest.mark.main_version
def test_bad_interval_is_refused_at_start_up(tiny_model, tmp_path):
    text, fault, nearest = "17", "16", "16 and 32"  # of every kind: tests/unit/retention
    report = tmp_path / "report.json"
    ended = start(tiny_model, report, {INTERVAL: text}, {}, ("chat",))
    assert ended.exit_code != 0
    assert not report.exists()
    (message,) = {
        line.partition("Error: ")[2]
        for line in ended.log.splitlines()
        if f"Error: {INTERVAL}" in line
    }
    assert repr(text) in message
    assert fault in message
    assert f"multiple of {BLOCK_TOKENS} tokens" in message
    assert f"nearest valid values are {nearest}" in message
