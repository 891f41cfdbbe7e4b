# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt are reused, and which are computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.blending.blend_plan import BlendPlan, behind_head, plan_blend
from vllm_ascend_kvext.blending.segments import Segment
from vllm_ascend_kvext.holes.span_plan import Run


def test_a_head_is_computed() -> None:
    assert behind_head(Segment(100, 200), 100, 16) == Run(116, 200)
    assert behind_head(Segment(100, 200), 100, 0) == Run(100, 200)


def test_a_segment_shorter_than_two_heads_is_computed() -> None:
    assert behind_head(Segment(100, 131), 31, 16) is None
    assert behind_head(Segment(100, 132), 32, 16) == Run(116, 132)


def test_a_window_makes_heads_longer() -> None:
    assert behind_head(Segment(100, 200), 100, 16, 40) == Run(140, 200)
    assert behind_head(Segment(100, 200), 100, 16, 100) is None


def test_what_is_not_stored_is_computed() -> None:
    assert behind_head(Segment(100, 200), 50, 16) == Run(116, 150)
    assert behind_head(Segment(100, 200), 16, 16) is None


def test_a_prompt_of_exact_beginning_segments_and_question() -> None:
    plan = plan_blend(500, 64, [Run(96, 200), Run(216, 300)], 1)
    assert plan == BlendPlan(
        exact_tokens=64,
        reused=(Run(96, 200), Run(216, 300)),
        holes=(Run(64, 96), Run(200, 216)),
        resume_tokens=300,
    )
    assert plan.reused_tokens == 188


def test_the_last_token_is_computed() -> None:
    plan = plan_blend(200, 0, [Run(0, 200)], 1)
    assert plan is not None
    assert plan.resume_tokens == 199
    assert plan.holes == ()


def test_what_is_exact_is_not_reused() -> None:
    plan = plan_blend(200, 120, [Run(16, 100), Run(100, 150)], 1)
    assert plan is not None
    assert plan.reused == (Run(120, 150),)
    assert plan_blend(200, 150, [Run(16, 100), Run(100, 150)], 1) is None


@st.composite
def disjoint_runs(draw: st.DrawFn) -> list[Run]:
    cuts = sorted(draw(st.lists(st.integers(0, 60), unique=True, max_size=8)))
    return [Run(first, end) for first, end in zip(cuts[::2], cuts[1::2], strict=False)]


@given(disjoint_runs(), st.integers(0, 60), st.integers(1, 70), st.integers(1, 10))
def test_every_token_is_exact_reused_or_computed_once(
    candidates: list[Run], exact_tokens: int, num_tokens: int, least_run_tokens: int
) -> None:
    exact_tokens = min(exact_tokens, num_tokens - 1)
    plan = plan_blend(num_tokens, exact_tokens, candidates, least_run_tokens)
    wanted = {token for run in candidates for token in range(*run)}
    reusable = {token for token in wanted if exact_tokens <= token < num_tokens - 1}
    if plan is None:
        runs = [[token for token in range(*run) if token in reusable] for run in candidates]
        assert all(len(run) < least_run_tokens for run in runs)
        return
    exact = list(range(plan.exact_tokens))
    reused = [token for run in plan.reused for token in range(*run)]
    computed = [token for run in plan.holes for token in range(*run)]
    resumed = list(range(plan.resume_tokens, num_tokens))
    assert sorted(exact + reused + computed + resumed) == list(range(num_tokens))
    assert set(reused) <= reusable
    assert resumed
    assert all(run.num_tokens >= least_run_tokens for run in plan.reused)
    assert all(run.num_tokens > 0 for run in plan.holes)
