# SPDX-License-Identifier: Apache-2.0
"""Prompts of a model with latents (MLA), blended in pages: what they answer is what an oracle says.

vLLM's CPU backend refuses such models, so a tiny one computes here without the engine. All rows of
pages that nobody has written are no numbers, and so are answers that read one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from support.blending.latent_model import PageFormat  # noqa: E402
from support.blending.latent_oracle import LatentOracle  # noqa: E402
from support.blending.latent_weights import (  # noqa: E402
    NORM_EPSILON,
    Sizes,
    Yarn,
    random_weights,
)
from support.blending.latent_worker import BLOCK_TOKENS, LatentWorker  # noqa: E402
from support.blending.reused import Reused  # noqa: E402

from vllm_ascend_kvext.blending.device_token_pages import PlacedPlane  # noqa: E402
from vllm_ascend_kvext.blending.rotary_signature import RotarySignature  # noqa: E402
from vllm_ascend_kvext.blending.segment_rows import SegmentRows  # noqa: E402
from vllm_ascend_kvext.blending.segments import Segment  # noqa: E402
from vllm_ascend_kvext.transfer.schema import PairStyle, RowDtype  # noqa: E402

TOLERANCE = 1e-4
"""Log-probabilities, fp32 against float64."""
WRONG = 0.1
"""What is wrong differs by more."""
HEAD_TOKENS = 4
SINK_IDS = (7, 8, 9)
SIZES = {"plain": Sizes(), "YaRN": Sizes(yarn=Yarn(factor=8.0))}
FORMATS = [pytest.param(each, id=each.value) for each in PageFormat]


def random_tokens(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(10, Sizes().vocabulary), k=num_tokens)


STORED = {
    name: random_tokens(seed, num_tokens)
    for seed, (name, num_tokens) in enumerate(
        {"A": 37, "B": 53, "C": 41, "D": 41, "short": 2 * HEAD_TOKENS - 1}.items()
    )
}
TEXTS = STORED | {"missing": random_tokens(11, 30)}
SWAPPED = "C", "D"


class Prompt(NamedTuple):
    """Instructions, texts with a few tokens between them, and a question."""

    token_ids: list[int]
    segments: list[Segment]
    reused: list[Reused]


def prompt_of(*names: str, seed: int) -> Prompt:
    rng = random.Random(seed)
    token_ids, segments, reused = random_tokens(seed, 13), [], []
    for name in names:
        first, end = len(token_ids), len(token_ids) + len(TEXTS[name])
        segments.append(Segment(first, end))
        if name not in ("short", "missing"):
            reused.append(Reused(first + HEAD_TOKENS, end, (first, end)))
        token_ids = token_ids + TEXTS[name] + random_tokens(seed + first, rng.randrange(4))
    return Prompt(token_ids + random_tokens(seed + 1, 19), segments, reused)


PROMPT = prompt_of("C", "A", "missing", "short", "D", "B", "A", seed=21)
"""The same text stands in it twice."""


def worker_of(sizes: Sizes, page_format: PageFormat, **arguments: Any) -> LatentWorker:
    """That has stored what is stored."""
    worker = LatentWorker(random_weights(sizes), sizes, page_format, SINK_IDS, **arguments)
    for token_ids in STORED.values():
        worker.store(token_ids)
    return worker


def oracle_of(sizes: Sizes) -> LatentOracle:
    return LatentOracle(random_weights(sizes), sizes, SINK_IDS)


def behind(prompt: Prompt, found: Any, expected: Any) -> float:
    """The largest difference of a log-probability behind the last segment, of any token."""
    num_tokens = len(prompt.token_ids) - prompt.segments[-1].end_tokens
    difference = (found[-num_tokens:] - expected[-num_tokens:]).abs().max()
    return float("inf") if difference.isnan() else float(difference)


def test_the_oracle_is_deepseek_v2() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = SIZES["YaRN"]
    yarn = sizes.yarn
    config = transformers.DeepseekV2Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        first_k_dense_replace=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        kv_lora_rank=sizes.rank,
        q_lora_rank=None,
        qk_nope_head_dim=sizes.nope,
        qk_rope_head_dim=sizes.rope,
        v_head_dim=sizes.value,
        rms_norm_eps=NORM_EPSILON,
        max_position_embeddings=int(yarn.original_tokens * yarn.factor),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": sizes.theta,
            "factor": yarn.factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
            "original_max_position_embeddings": yarn.original_tokens,
        },
    )
    model = transformers.DeepseekV2ForCausalLM(config).eval()
    model.load_state_dict(random_weights(sizes))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT.token_ids])).logits[0]
    found = oracle_of(sizes).log_probabilities(PROMPT.token_ids)
    assert float((torch.log_softmax(logits.double(), -1) - found).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("step_tokens", [400, 17])
@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_blended_answers_are_those_of_the_oracle(
    sizes: Sizes, page_format: PageFormat, step_tokens: int
) -> None:
    worker, oracle = worker_of(sizes, page_format), oracle_of(sizes)
    prompts = [PROMPT, prompt_of("B", "D", "A", "C", seed=30), prompt_of("missing", "A", seed=40)]
    for prompt in prompts:
        blended = worker.blend(
            prompt.token_ids, prompt.segments, HEAD_TOKENS, step_tokens=step_tokens
        )
        assert blended.plan is not None
        assert list(blended.plan.reused) == [each[:2] for each in prompt.reused]
        expected = oracle.log_probabilities(prompt.token_ids, prompt.reused)
        assert float((blended.log_probabilities - expected).abs().max()) <= TOLERANCE
        # It could be told from full recompute.
        assert behind(prompt, expected, oracle.log_probabilities(prompt.token_ids)) > WRONG


def test_rows_change_their_place_in_a_block() -> None:
    """Neither where they come from nor where they go do blocks begin."""
    source = len(SINK_IDS) + HEAD_TOKENS
    assert source % BLOCK_TOKENS
    targets = [each.first_tokens for each in PROMPT.reused]
    assert all(target % BLOCK_TOKENS for target in targets)
    assert len({(target - source) % BLOCK_TOKENS for target in targets} - {0}) > 2


@pytest.mark.parametrize("page_format", FORMATS)
def test_a_segment_where_it_was_computed_is_exact(page_format: PageFormat) -> None:
    sizes = SIZES["YaRN"]
    first = len(SINK_IDS)
    token_ids = [*SINK_IDS, *STORED["B"], *random_tokens(50, 19)]
    segments = [Segment(first, first + len(STORED["B"]))]
    blended = worker_of(sizes, page_format).blend(token_ids, segments, 0)
    assert blended.plan is not None and blended.plan.reused == (tuple(segments[0]),)
    expected = oracle_of(sizes).log_probabilities(token_ids)
    assert behind(Prompt(token_ids, segments, []), blended.log_probabilities, expected) <= TOLERANCE


@pytest.mark.parametrize("page_format", FORMATS)
def test_latents_are_copied_bit_by_bit(page_format: PageFormat) -> None:
    worker = worker_of(SIZES["plain"], page_format)
    once = prompt_of("A", seed=60)
    twice = prompt_of("B", "A", seed=70)
    rows = []
    for prompt in (once, twice):
        blended = worker.blend(prompt.token_ids, prompt.segments, HEAD_TOKENS)
        places = torch.arange(*prompt.reused[-1][:2])
        slots = worker.pages.slots(blended.table, places)
        rows.append([worker.pages.read(layer, slots) for layer in range(Sizes().layers)])
    for (latents, keys), (same_latents, other_keys) in zip(*rows, strict=True):
        assert torch.equal(latents, same_latents) and not latents.isnan().any()
        assert not torch.equal(keys, other_keys)


# What is wrong shows.


def turning_latents(placed: PlacedPlane) -> PlacedPlane:
    """What stands before the rotated part of a row turns, too, or a tensor of its own."""
    plane = placed.plane
    rotated = () if plane.keys is None else plane.keys.frequencies
    latent_elements = plane.head_elements - 2 * len(rotated)
    signature = RotarySignature(
        (0.3,) * (latent_elements // 2) + rotated,
        PairStyle.NEIGHBOURS,
        plane.head_elements,
        0,
        RowDtype.FLOAT32,
    )
    return replace(placed, plane=replace(plane, keys=signature))


def by_halves(placed: PlacedPlane) -> PlacedPlane:
    """Pairs are not neighbours, but lie half of the part away."""
    keys = placed.plane.keys
    if keys is None:
        return placed
    keys = replace(keys, pair_style=PairStyle.HALVES)
    return replace(placed, plane=replace(placed.plane, keys=keys))


def swapped(token_ids: Sequence[int]) -> Sequence[int]:
    one, other = (STORED[name] for name in SWAPPED)
    return {tuple(one): other, tuple(other): one}.get(tuple(token_ids), token_ids)


def not_rotated(rows: SegmentRows) -> SegmentRows:
    return rows._replace(shift_tokens=0)


def one_further(rows: SegmentRows) -> SegmentRows:
    return rows._replace(shift_tokens=rows.shift_tokens + 1)


def one_row_before(rows: SegmentRows) -> SegmentRows:
    """Those of the tokens before, where the section has such."""
    return rows._replace(first_row=max(rows.first_row - 1, 0))


CONTROLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "not rotated": ({}, {"change_rows": not_rotated}),
    "one position further": ({}, {"change_rows": one_further}),
    "rows of the token before": ({}, {"change_rows": one_row_before}),
    "two segments swapped": ({}, {"found_for": swapped}),
    "latents rotated as well": ({"change_planes": turning_latents}, {}),
    "other pairs": ({"change_planes": by_halves}, {}),
}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("page_format", FORMATS)
def test_what_is_loaded_wrong_shows(page_format: PageFormat, control: str) -> None:
    of_worker, of_prompt = CONTROLS[control]
    sizes = SIZES["YaRN"]
    worker = worker_of(sizes, page_format, **of_worker)
    blended = worker.blend(PROMPT.token_ids, PROMPT.segments, HEAD_TOKENS, **of_prompt)
    assert blended.plan is not None and len(blended.plan.reused) == len(PROMPT.reused)
    expected = oracle_of(sizes).log_probabilities(PROMPT.token_ids, PROMPT.reused)
    assert behind(PROMPT, blended.log_probabilities, expected) > WRONG
