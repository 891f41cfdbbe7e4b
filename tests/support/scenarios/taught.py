# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts with their replies, whose log-probabilities an engine without a cache computes at once.

So all steps of a reply can be compared, even if rounding has led two engines to other tokens.

Option of a plan: ``sequences``, pairs of a sequence of token ids and where its reply begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from support.scenarios import engine, scenario
from support.scenarios.answers import Answer

MOST_TOKENS = 20
"""The best tokens of each step that the engine reports, the largest number that vLLM allows."""
AT_ONCE = 8
"""Sequences that are asked together."""

Steps = Sequence[Mapping[str, float]]
"""Log-probabilities by token, of each step of a reply."""


class Engine(engine.Engine):
    """A reference."""


@scenario
def teach(engine: Engine) -> None:
    """Report for each sequence the log-probabilities of the best tokens at each of its steps."""
    from vllm import SamplingParams

    sequences = engine.plan["sequences"]
    sampling = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=MOST_TOKENS, detokenize=False
    )
    found = []
    for first in range(0, len(sequences), AT_ONCE):
        some = sequences[first : first + AT_ONCE]
        prompts = [{"prompt_token_ids": tokens} for tokens, _ in some]
        outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
        for (_, reply_begin), output in zip(some, outputs, strict=True):
            if output.num_cached_tokens:
                raise RuntimeError("the reference has a cache")
            steps = output.prompt_logprobs[reply_begin:]
            found.append(
                [{str(token): entry.logprob for token, entry in step.items()} for step in steps]
            )
    engine.note("steps", found)


def taught_error(answer: Answer, expected: Steps) -> float:
    """The largest difference of a top-5 log-probability from the reference's.

    A token that is not among the reference's best ones differs at least as much as the worst of
    them. A reply whose token is not the reference's best differs by how far that is behind.
    """
    if len(expected) != len(answer.reply):
        raise ValueError(f"expected {len(answer.reply)} steps, found {len(expected)}")
    worst = 0.0
    for token, step, theirs in zip(answer.reply, answer.logprobs, expected, strict=True):
        lowest = min(theirs.values())
        differences = [abs(value - theirs.get(name, lowest)) for name, value in step.items()]
        differences.append(max(theirs.values()) - theirs.get(str(token), lowest))
        worst = max(worst, *(float("inf") if value != value else value for value in differences))
    return worst
