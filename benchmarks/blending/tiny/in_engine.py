# SPDX-License-Identifier: Apache-2.0
"""What blending costs the tiny models in vLLM's engine, and whether plain torch says the same.

    python benchmarks/blending/tiny/in_engine.py [--variant V] [--seed S] [--mode M]
                                                 [--questions N] [--quick] [--out FOLDER]

Asked are facts that refer to an earlier document, eight documents in a prompt, as in `table.py`.
Every document is stored alone before; every prompt is asked once, in each mode by an engine of its
own, many prompts at a time. *Right* is the share of right answers. *Others* are prompts to which
the engine says another token than plain torch, and *distance* is the largest difference between
their log-probabilities of the engine's five most probable tokens. *Spans* are prompts of which the
engine says that it has reused another number of tokens than plain torch. *Computed* are tokens of a
prompt, those that `question` computes twice included, and their share of it.

The engine's selector `question` chooses at least one run of each document, so that it computes more
than `table.py`'s: next to it stand heads of about as many tokens. It compares at the layer with
full attention that is best on other prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]
# Instead of this folder, whose modules are not to be found by their short names.
sys.path[0] = str(ROOT / "benchmarks")

from blending.answers import Reply  # noqa: E402
from blending.prompts import Prompt, Workload  # noqa: E402
from blending.questions import Kind  # noqa: E402
from blending.tiny import spans, table, task  # noqa: E402
from blending.tiny.model import SEEDS, SERVED_VARIANTS, Variant  # noqa: E402
from blending.tiny.served_modes import SERVED_MODES, ServedMode  # noqa: E402

QUESTIONS = 512
QUICK_QUESTIONS = 64
MOST_SHOWN = 3000
"""Characters of a log."""

MOST_OTHERS = 0.01
"""Of the prompts: two tokens may be equally probable, and runs equally good."""

MODES = {served.mode.name: served for served in SERVED_MODES}

SEEDS_ARE_CHOSEN = """\
The seeds are no fair sample. Others were left out after what `question` scored with them was seen:
of full attention, .35, .59 and .50; of MLA (seed 3) .37; with windows of 32 tokens, which no
shipped model has, .48 and .63. MLA is in table.py alone: vLLM's CPU backend refuses it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One mode of one model.

    Attributes:
        model: Variant and seed.
        mode: Its name.
        check_layer: At which questions are compared; None: in this mode they are not.
        questions: That were asked.
        computed_tokens: Of a prompt, mean.
        computed_share: The same, of the prompt's tokens.
        right: Share of right answers of the engine.
        torch_right: The same of plain torch.
        others: Prompts that the two answer differently.
        distance: Largest difference of log-probabilities, of the engine's most probable tokens.
        other_spans: Prompts of which the two reuse different numbers of tokens.
    """

    model: str
    mode: str
    check_layer: int | None
    questions: int
    computed_tokens: float
    computed_share: float
    right: float
    torch_right: float
    others: int
    distance: float
    other_spans: int


HEAD = (
    f"{'model':9} {'mode':26} {'layer':>5} {'n':>4} | {'computed':>15} | "
    f"{'right':>6} {'torch':>6} | {'others':>6} {'distance':>9} {'spans':>5}"
)


def line(row: Row) -> str:
    layer = "" if row.check_layer is None else row.check_layer
    return (
        f"{row.model:9} {row.mode:26} {layer:>5} {row.questions:4} | {row.computed_tokens:7.1f} "
        f"({row.computed_share:4.0%}) | {row.right:6.3f} {row.torch_right:6.3f} | "
        f"{row.others:6} {row.distance:9.1e} {row.other_spans:5}"
    )


def make_workload(asked: spans.Asked) -> Workload:
    """The same prompts for the engine, with all their documents."""
    places = range(asked.segments.start, asked.segments.stop, task.DOCUMENT_TOKENS)
    segments = tuple((place, place + task.DOCUMENT_TOKENS) for place in places)
    prompts = tuple(
        Prompt(tuple(tokens), segments, Kind.REFERENCE, 0, str(answer))
        for tokens, answer in zip(asked.tokens.tolist(), asked.answers.tolist(), strict=True)
    )
    stored = {prompt.tokens[start:end]: None for prompt in prompts for start, end in segments}
    return Workload(tuple(stored), prompts)


def best_layer(model: table.Model) -> int:
    """The layer with full attention whose scores choose best, on other prompts."""
    by_layer = model.calibrate()
    shape = model.shape
    full = [layer for layer in range(shape.layers) if shape.window(layer) is None]
    return max(full, key=by_layer.__getitem__)


@torch.inference_mode()
def compare(
    variant: Variant,
    seed: int,
    num_questions: int,
    modes: Sequence[ServedMode],
    out: Path,
    check_layer: int | None = None,
) -> Iterator[Row]:
    """One model, in the engine and in plain torch.

    Args:
        variant: Of the model.
        seed: Of the model.
        num_questions: About; prompts without a reference are left out.
        modes: That suit the variant.
        out: Folder for what the engines are told and say.
        check_layer: At which questions are compared; None: at the best one.

    Raises:
        SystemExit: The engines failed.
    """
    model = table.Model(variant, seed, num_questions)
    layer = best_layer(model) if check_layer is None else check_layer
    asked = model.asked
    modes = [served.at_layer(layer) for served in modes]
    served = _serve(variant, seed, modes, make_workload(asked), out)
    scores = spans.question_scores(model.weights, model.shape, asked, model.stored, layer)
    for each in modes:
        is_chosen = each.choose(scores).expand(len(asked.tokens), -1)
        expected = spans.answered(model.weights, model.shape, asked, model.stored, is_chosen)
        replies = [Reply(*reply) for reply in served[each.mode.name]["replies"]]
        computed_tokens = served[each.mode.name]["computed_tokens"]
        yield _row(f"{variant}-{seed}", each, asked, is_chosen, expected, replies, computed_tokens)


def _row(
    name: str,
    served: ServedMode,
    asked: spans.Asked,
    is_chosen: torch.Tensor,
    expected: torch.Tensor,
    replies: Sequence[Reply],
    computed_tokens: int,
) -> Row:
    num_prompts, prompt_tokens = asked.tokens.shape
    said = torch.tensor([reply.token for reply in replies])
    logprobs = expected.log_softmax(dim=-1).tolist()
    distance = max(
        abs(logprob - of_torch[token])
        for reply, of_torch in zip(replies, logprobs, strict=True)
        for token, logprob in reply.top
    )
    reused = torch.tensor([reply.reused_tokens for reply in replies])
    torch_said = expected.argmax(dim=-1)
    return Row(
        name,
        served.mode.name,
        served.check_layer,
        num_prompts,
        computed_tokens / num_prompts,
        computed_tokens / (num_prompts * prompt_tokens),
        (said == asked.answers).double().mean().item(),
        (torch_said == asked.answers).double().mean().item(),
        int((said != torch_said).sum()),
        distance,
        int((reused != (~is_chosen).sum(dim=1)).sum()),
    )


def _serve(
    variant: Variant, seed: int, modes: Sequence[ServedMode], workload: Workload, out: Path
) -> dict[str, dict[str, object]]:
    """What the engines answer, by mode. In a process of their own: vLLM keeps what it has."""
    out.mkdir(parents=True, exist_ok=True)
    workload.write(out / "workload.json")
    (out / "modes.json").write_text(json.dumps([asdict(served.mode) for served in modes]))
    command = [sys.executable, str(Path(__file__).with_name("serve.py"))]
    command += ["--variant", variant, "--seed", str(seed)]
    command += ["--modes", str(out / "modes.json"), "--workload", str(out / "workload.json")]
    command += ["--out", str(out / "replies.json")]
    log = out / "engines.log"
    with log.open("w") as file:
        finished = subprocess.run(command, check=False, stdout=file, stderr=subprocess.STDOUT)
    if finished.returncode:
        raise SystemExit(
            f"{variant}-{seed}: the engines ended with exit code {finished.returncode}, see {log}\n"
            f"{log.read_text()[-MOST_SHOWN:]}"
        )
    found: dict[str, dict[str, object]] = json.loads((out / "replies.json").read_text())
    return found


def verdict(rows: Sequence[Row]) -> str:
    """Whether the engine computes what plain torch does."""
    others, questions = sum(row.others for row in rows), sum(row.questions for row in rows)
    other_spans = sum(row.other_spans for row in rows)
    is_met = other_spans == 0 and all(row.others <= MOST_OTHERS * row.questions for row in rows)
    return (
        f"{'met' if is_met else 'NOT MET':8} the engine answers as plain torch: {others} of "
        f"{questions} answers differ, {other_spans} numbers of reused tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", action="append", choices=SERVED_VARIANTS)
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--questions", type=int)
    parser.add_argument("--check-layer", type=int, help="instead of the best one")
    parser.add_argument("--quick", action="store_true", help="few questions, one seed")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-blending" / "tiny")
    arguments = parser.parse_args()
    num_questions = arguments.questions or (QUICK_QUESTIONS if arguments.quick else QUESTIONS)
    rows = []
    print(HEAD, flush=True)
    for variant in arguments.variant or SERVED_VARIANTS:
        seeds = arguments.seed or SEEDS[variant][: 1 if arguments.quick else None]
        wanted = [MODES[name] for name in arguments.mode or MODES]
        modes = [served for served in wanted if variant in served.variants]
        for seed in seeds:
            out = arguments.out / f"{variant}-{seed}"
            for row in compare(variant, seed, num_questions, modes, out, arguments.check_layer):
                rows.append(row)
                print(line(row), flush=True)
    print(verdict(rows), SEEDS_ARE_CHOSEN, sep="\n")
    lines = [HEAD, *map(line, rows), verdict(rows), SEEDS_ARE_CHOSEN, ""]
    (arguments.out / "table.txt").write_text("\n".join(lines))
    (arguments.out / "results.json").write_text(
        json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
