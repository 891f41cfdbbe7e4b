# SPDX-License-Identifier: Apache-2.0
"""What the engine of one mode found, as JSON. Imports nothing of vLLM."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt.

    Attributes:
        tokens: That the model said.
        top: Of each token of the reference's answer, the most probable tokens and their
            log-probabilities, when what came before was the reference's.
        first_token_s: From adding the request to its first token.
        computed_tokens: That the engine computed until then.
        exact_tokens: Of the prompt, that the response says were cached exactly; None: not said.
        reused_tokens: That it says were reused.
        recomputed_tokens: That it says were computed behind the first reused one.
    """

    tokens: list[int]
    top: list[dict[int, float]]
    first_token_s: float
    computed_tokens: int
    exact_tokens: int | None = None
    reused_tokens: int | None = None
    recomputed_tokens: int | None = None


class Reply(NamedTuple):
    """The first token that follows a prompt.

    Attributes:
        token: The most probable one.
        top: The most probable tokens and their log-probabilities.
        reused_tokens: Of the prompt, that the response says were reused.
    """

    token: int
    top: list[tuple[int, float]]
    reused_tokens: int


@dataclass(slots=True)
class Answers:
    """One mode.

    Attributes:
        mode: Its name.
        store_s: Of each stored document.
        answers: Of the prompts, in their order.
    """

    mode: str
    store_s: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> Answers:
        found: dict[str, Any] = json.loads(path.read_text())
        answers = [
            Answer(**{**each, "top": [_by_number(top) for top in each["top"]]})
            for each in found["answers"]
        ]
        return cls(found["mode"], found["store_s"], answers)


def _by_number(top: dict[str, float]) -> dict[int, float]:
    """JSON's keys are texts."""
    return {int(token): value for token, value in top.items()}
