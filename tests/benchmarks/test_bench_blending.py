# SPDX-License-Identifier: Apache-2.0
"""The benchmark of blending: tiny models in plain torch and in vLLM, and the real one's weights."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from blending import smollm2  # noqa: E402
from blending.answers import Answers  # noqa: E402
from blending.modes import FULL, PREFIX_CACHING  # noqa: E402
from blending.prompts import Workload  # noqa: E402
from blending.tiny import in_engine, spans, table, train  # noqa: E402
from blending.tiny.model import (  # noqa: E402
    SEEDS,
    VARIANTS,
    Shape,
    Variant,
    forward,
    initial_weights,
    load,
    rotate,
    weights_path,
    write_folder,
)
from blending.tiny.spans import Selector  # noqa: E402

SHIPPED = [
    (variant, seed)
    for variant in VARIANTS
    for seed in SEEDS[variant]
    if weights_path(variant, seed).is_file()
]
CPU = torch.device("cpu")


def some(variant: Variant) -> tuple[dict[str, torch.Tensor], Shape, spans.Asked]:
    """Random weights and prompts."""
    asked = spans.ask_references(np.random.default_rng(1), 6, CPU)
    return initial_weights(Shape(variant), 1), Shape(variant), asked


@pytest.mark.parametrize("variant", VARIANTS)
class TestSpans:
    def test_what_is_recomputed_entirely_is_a_full_prefill(self, variant: Variant) -> None:
        weights, shape, asked = some(variant)
        stored = spans.stored_rows(weights, shape, asked)
        everything = torch.ones(1, asked.segment_tokens, dtype=torch.bool)
        found = spans.answered(weights, shape, asked, stored, everything)
        logits = forward(weights, shape, asked.tokens).logits
        assert logits is not None
        torch.testing.assert_close(found, logits[:, -1], atol=1e-4, rtol=1e-4)

    def test_the_first_document_is_exact_and_the_second_is_not(self, variant: Variant) -> None:
        """The first one is stored behind the same sink, at its own place."""
        weights, shape, asked = some(variant)
        full = forward(weights, shape, asked.tokens).rows[-1]
        stored = spans.stored_rows(weights, shape, asked)[-1]
        first, second = slice(1, 16), slice(16, 31)
        for of_full, of_stored in zip(full, stored, strict=True):
            torch.testing.assert_close(of_stored[:, first], of_full[:, first], atol=1e-4, rtol=1e-4)
            assert (of_stored[:, second] - of_full[:, second]).abs().max() > 1e-2

    def test_keys_are_rotated_to_their_places(self, variant: Variant) -> None:
        """In the first layer nothing but the place of a token matters."""
        weights, shape, asked = some(variant)
        full = forward(weights, shape, asked.tokens).rows[0].rotated[:, asked.segments]
        moved, unmoved = (
            spans.stored_rows(weights, shape, asked, moves=moves)[0].rotated[:, asked.segments]
            for moves in (True, False)
        )
        torch.testing.assert_close(moved, full, atol=1e-4, rtol=1e-4)
        assert (unmoved - full).abs().max() > 1e-2

    def test_a_fresh_token_reads_stored_rows(self, variant: Variant) -> None:
        """Computed one by one with a cache in between, the chosen tokens come out the same."""
        weights, shape, asked = some(variant)
        stored = spans.stored_rows(weights, shape, asked)
        chosen = spans.choose(Selector.HEADS, None, asked.num_documents, 16)
        found = spans.answered(weights, shape, asked, stored, chosen)
        is_fresh = asked.always_fresh()
        is_fresh[:, asked.segments] |= chosen
        cache = stored
        for place in is_fresh[0].nonzero()[:, 0].tolist():
            only = torch.zeros_like(is_fresh)
            only[:, place] = True
            passed = forward(weights, shape, asked.tokens, cache, only)
            cache = passed.rows
        assert passed.logits is not None
        torch.testing.assert_close(found, passed.logits[:, -1], atol=1e-4, rtol=1e-4)


def test_budgets_are_kept() -> None:
    scores = torch.rand(5, 120, generator=torch.Generator().manual_seed(0))
    for selector in (Selector.RANDOM, Selector.QUESTION, Selector.HEADS):
        assert spans.choose(selector, scores, 8, 18).sum(dim=1).tolist() in ([18] * 5, [18])
    runs = spans.choose(Selector.QUESTION_RUNS, scores, 8, 18)
    # Four runs; the last one of a document has three tokens.
    assert all(12 <= count <= 16 for count in runs.sum(dim=1).tolist())
    best = scores.argmax(dim=1)
    assert runs[torch.arange(5), best].all()
    heads = spans.choose(Selector.HEADS, None, 8, 18).reshape(8, 15)
    assert heads[:2, :3].all()
    assert heads[2:, :2].all()
    assert heads.sum() == 18


@pytest.mark.parametrize("run_tokens", (4, 5, 8))
@pytest.mark.parametrize("ratio", (0.1, 0.4, 0.7, 1.0))
def test_runs_are_those_that_the_connector_chooses(ratio: float, run_tokens: int) -> None:
    from vllm_ascend_kvext.blending.question_selection import select_runs
    from vllm_ascend_kvext.holes.span_plan import Run

    scores = torch.rand(5, 120, generator=torch.Generator().manual_seed(0))
    documents = [Run(first, first + 15) for first in range(0, 120, 15)]
    found = spans.runs_of_each(scores, 8, ratio, run_tokens)
    for of_prompt, scores_of_prompt in zip(found, scores.numpy(), strict=True):
        runs = select_runs(documents, scores_of_prompt, documents, ratio, run_tokens)
        chosen = [token for run in runs for token in range(run.first_tokens, run.end_tokens)]
        assert of_prompt.nonzero()[:, 0].tolist() == chosen
        assert of_prompt.view(8, 15).any(dim=1).all()


def test_rotation_adds_up() -> None:
    rows = torch.randn(2, 7, 3, 16, generator=torch.Generator().manual_seed(0))
    by = torch.arange(7)
    there = rotate(rotate(rows, by), by + 30)
    torch.testing.assert_close(there, rotate(rows, 2 * by + 30), atol=1e-4, rtol=1e-4)


@pytest.mark.main_version
@pytest.mark.parametrize("variant, seed", SHIPPED)
@torch.inference_mode()
def test_shipped_models_lose_references_and_regain_them(variant: Variant, seed: int) -> None:
    model = table.Model(variant, seed, 128)
    by_layer = model.calibrate()
    assert model.full() > 0.97
    assert model.plain() < 0.2
    layer = by_layer.index(max(by_layer))
    assert model.blended(Selector.QUESTION, 0.15, layer) > 0.9
    assert model.blended(Selector.HEADS, 0.15, layer) < 0.3


def test_shipped_weights_are_under_2_mb() -> None:
    sizes = [weights_path(variant, seed).stat().st_size for variant, seed in SHIPPED]
    assert len(sizes) == 7
    assert sum(sizes) < 2_000_000


def test_a_model_begins_to_learn() -> None:
    trainer = train.Trainer("full", 0, CPU)
    before = {name: each.detach().clone() for name, each in trainer.weights.items()}
    assert 0.0 <= trainer.copy() < 0.2
    assert 0.0 <= trainer.answer(2) < 0.2
    assert all((trainer.weights[name] != each).any() for name, each in before.items())


def test_rows_that_turn_together_are_taken_apart() -> None:
    """As llama.cpp orders them: each pair's rows are neighbours."""
    wanted = torch.arange(2 * 8 * 3).reshape(2, 2, 4, 3)
    as_gguf = wanted.transpose(1, 2).reshape(16, 3).numpy()
    found = smollm2.halves_of_pairs(as_gguf, 2)
    assert (found == wanted.reshape(16, 3).numpy()).all()


@pytest.fixture(scope="module")
def tiny_workload() -> Workload:
    return in_engine.make_workload(spans.ask_references(np.random.default_rng(3), 4, CPU))


@pytest.mark.main_version
@pytest.mark.parametrize("variant", ("full", "window"))
def test_the_engine_agrees_with_plain_torch(
    variant: Variant, tiny_workload: Workload, tmp_path: Path
) -> None:
    """Full recompute and prefix caching, in processes as `run.py` starts them."""
    seed = SEEDS[variant][0]
    write_folder(variant, seed, tmp_path / "model")
    tiny_workload.write(tmp_path / "workload.json")
    answers = {}
    for mode in (FULL, PREFIX_CACHING):
        command = [sys.executable, str(ROOT / "benchmarks" / "blending" / "engine.py")]
        command += ["--mode", mode.name, "--model", str(tmp_path / "model")]
        command += ["--workload", str(tmp_path / "workload.json")]
        command += ["--out", str(tmp_path / f"{mode.name}.json")]
        if mode is not FULL:
            command += ["--reference", str(tmp_path / f"{FULL.name}.json")]
        subprocess.run([*command, "--max-model-tokens", "256"], check=True)
        answers[mode.name] = Answers.read(tmp_path / f"{mode.name}.json")
    weights = load(variant, seed)
    full, cached = answers[FULL.name].answers, answers[PREFIX_CACHING.name].answers
    for prompt, one, other in zip(tiny_workload.prompts, full, cached, strict=True):
        assert str(one.tokens[0]) == prompt.answer
        assert one.computed_tokens == len(prompt.tokens)
        assert one.first_token_s > 0
        assert other.tokens == one.tokens
        logits = forward(weights, Shape(variant), torch.tensor([prompt.tokens])).logits
        assert logits is not None
        expected = logits[0, -1].log_softmax(dim=-1)
        for answer in (one, other):
            assert len(answer.top) == len(one.tokens)
            for token, found in answer.top[0].items():
                assert found == pytest.approx(expected[token].item(), abs=1e-3)


@pytest.mark.main_version
def test_blended_prompts_in_the_engine_are_those_in_plain_torch(tmp_path: Path) -> None:
    """Windows and full attention; everything is stored before, and every prompt is new."""
    modes = [in_engine.MODES[name] for name in ("plain reuse", "question 10%, runs of 4")]
    plain, question = in_engine.compare(
        "window", SEEDS["window"][0], 12, modes, tmp_path, check_layer=1
    )
    for row in (plain, question):
        assert row.questions == 12
        assert (row.others, row.other_spans) == (0, 0)
        assert row.distance < 1e-3
        assert row.right == row.torch_right
    # The sink, and the question's two tokens.
    assert plain.computed_tokens == 3
    # These twice, and of each document a run of at most 4.
    assert 6 + 8 * 3 <= question.computed_tokens <= 6 + 8 * 4
    assert question.right > plain.right
    assert in_engine.verdict([plain, question]).startswith("met")
    assert in_engine.verdict([plain, replace(question, others=1)]).startswith("NOT MET")
    assert in_engine.verdict([replace(plain, other_spans=1)]).startswith("NOT MET")
