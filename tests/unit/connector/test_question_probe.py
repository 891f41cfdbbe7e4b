# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Questions are compared with keys in pages while the attention of a layer is computed.

torch is imported when a test runs, so the tests can be collected without torch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.segments import question_selection
from vllm_ascend_kvext.segments.keys.attention_keys import LayerKeys
from vllm_ascend_kvext.segments.keys.rotary import RotarySignature
from vllm_ascend_kvext.segments.messages import ProbeJob
from vllm_ascend_kvext.segments.token_rows import TokenPlane
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.schema import PairStyle, RowDtype

if TYPE_CHECKING:
    import torch

    from vllm_ascend_kvext.segments.worker.question_probe import QuestionProbe

LAYER = "model.layers.1.attn"
HEADS, KEY_HEADS, ELEMENTS = 4, 2, 8
PAGE_TOKENS = 4
NUM_PAGES = 20
IDS = (5, 3, 11, 7, 12)
"""The pages of a request of 20 tokens."""
ROW = TokenRange(14, 17)
SCORED = (TokenRange(2, 5), TokenRange(6, 12))
JOB = ProbeJob("a-hole-1", ROW, SCORED, (TablePart(0, ()), TablePart(0, IDS)))

SIGNATURE = RotarySignature((1.0, 0.5, 0.25, 0.125), PairStyle.HALVES, 8, 0, RowDtype.FLOAT32)
PLANES = tuple(
    TokenPlane(name, 1, KEY_HEADS, ELEMENTS, RowDtype.FLOAT32, keys)
    for name in ("model.layers.0.attn", LAYER)
    for keys in (SIGNATURE, None)
)


@dataclass
class Pages:
    """The rows, by plane and slot."""

    rows: np.ndarray
    planes: tuple[TokenPlane, ...] = PLANES
    tokens_per_page: Mapping[int, int] = field(default_factory=lambda: {1: PAGE_TOKENS})
    num_pages: int = NUM_PAGES

    def read_plane(self, index: int, slots: np.ndarray) -> np.ndarray:
        return self.rows[index, slots].view(np.uint8)

    def keys(self, tokens: range) -> torch.Tensor:
        """Keys of the checked layer. shape: [tokens, key heads, elements]."""
        import torch

        found = self.rows[2, [slot_of(token) for token in tokens]]
        return torch.from_numpy(found).reshape(len(tokens), KEY_HEADS, ELEMENTS)


def slot_of(token: int) -> int:
    return IDS[token // PAGE_TOKENS] * PAGE_TOKENS + token % PAGE_TOKENS


class Attention:
    """An attention implementation."""

    def forward(self, layer: Any, query: Any, key: Any = None, output: Any = None) -> Any:
        return "computed", layer, query, key, output


class Step:
    """A layer, and a step that it computes.

    The step has other tokens, padding, and a mixed-up row.
    """

    def __init__(self) -> None:
        torch = pytest.importorskip("torch")
        from vllm_ascend_kvext.segments.worker.question_probe import CheckLayer, QuestionProbe

        generator = torch.Generator().manual_seed(0)
        shape = len(PLANES), NUM_PAGES * PAGE_TOKENS, KEY_HEADS * ELEMENTS
        self.pages = Pages(torch.randn(shape, generator=generator).numpy())
        self.slots = torch.tensor([4, slot_of(16), slot_of(14), -1, slot_of(15), 77, -1])
        self.queries = torch.randn((len(self.slots), HEADS * ELEMENTS), generator=generator)

        self.attention = Attention()
        layer = CheckLayer(LAYER, self.attention, 0.3)
        self.probe: QuestionProbe = QuestionProbe(layer, self.pages, lambda: self.slots)

    def scores(self, *jobs: ProbeJob) -> dict[str, Any]:
        """The scores of one step."""
        self.probe.begin_step(jobs)
        returned = self.attention.forward("layer", self.queries, "key", output=3)
        assert returned == ("computed", "layer", self.queries, "key", 3)
        return self.probe.end_step()

    def expected(self) -> np.ndarray:
        """The attention, computed product by product."""
        import torch

        by_token = {14: self.queries[2], 15: self.queries[4], 16: self.queries[1]}
        scores = np.zeros(17)
        for token, of_token in by_token.items():
            keys = self.pages.keys(range(token + 1))
            for head, query in enumerate(of_token.reshape(HEADS, ELEMENTS)):
                logits = keys[:, head * KEY_HEADS // HEADS] @ query * 0.3
                scores[: token + 1] += torch.softmax(logits.double(), 0).numpy()
        return np.concatenate([scores[each.first_tokens : each.end_tokens] for each in SCORED])


@pytest.fixture
def step() -> Step:
    return Step()


def test_scores_are_attention_probabilities_of_all_heads_and_tokens(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of two bytes are read with their own type."""
    import torch

    rows = torch.from_numpy(step.pages.rows)
    as_bytes = rows.bfloat16().view(torch.uint8).numpy()
    step.pages.rows = rows.bfloat16().float().numpy()
    expected = step.expected()
    step.pages.rows = as_bytes
    step.pages.planes = tuple(replace(plane, dtype=RowDtype.BFLOAT16) for plane in PLANES)
    other = replace(JOB, row_id="other", scored=(TokenRange(0, 3),))
    scores, of_other = step.scores(JOB, other).values()
    assert scores.dtype == np.float32 and np.allclose(scores, expected, atol=1e-5)
    assert len(of_other) == 3
    assert step.scores() == {} == step.probe.end_step()
    # With this limit, the computation takes several parts.
    monkeypatch.setattr(question_selection, "MAX_LOGITS", 1)
    assert np.allclose(step.scores(JOB)["a-hole-1"], expected, atol=1e-5)
    step.probe.shutdown()
    step.probe.shutdown()
    assert step.scores(JOB) == {"a-hole-1": None}
    assert not vars(step.attention)


def test_a_probe_that_ends_late_leaves_the_next_one(step: Step) -> None:
    before = step.probe
    step.probe = type(before)(before._layer, step.pages, lambda: step.slots)
    before.shutdown()
    assert step.scores(JOB)[JOB.row_id] is not None


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(replace(JOB, tokens=TokenRange(13, 16)), id="a row that is not computed"),
        pytest.param(replace(JOB, tokens=TokenRange(18, 24)), id="no pages"),
        pytest.param(
            replace(JOB, block_ids=(TablePart(0, ()), TablePart(0, (0, *IDS[1:])))), id="null page"
        ),
    ],
)
def test_what_fails_does_not_end_the_step(step: Step, job: ProbeJob) -> None:
    assert step.scores(job) == {job.row_id: None}
    step.probe.begin_step([JOB])
    assert step.probe.end_step() == {JOB.row_id: None}, "a row without a computed step has scores"


class Graphs(enum.Enum):
    """Values of vLLM's ``CUDAGraphMode``.

    One is for steps that only decode, one for other steps.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_AND_PIECEWISE = (2, 1)
    FULL_DECODE_ONLY = (2, 0)

    def mixed_mode(self) -> Graphs:
        return Graphs(self.value[1]) if isinstance(self.value, tuple) else self


def choose(windows: list[int], index: int | None = None, **changes: Any) -> str:
    pytest.importorskip("torch")
    from vllm_ascend_kvext.segments.worker.question_probe import check_layer_of

    has_values = changes.pop("has_values", True)
    layers = {
        str(place): LayerKeys(SIGNATURE, KEY_HEADS, has_values, tokens)
        for place, tokens in enumerate(windows)
    }
    attention = SimpleNamespace(
        impl=changes.pop("impl", SimpleNamespace(scale=0.125)),
        use_direct_call=changes.pop("use_direct_call", False),
    )
    settings = {"mode": 0, "cudagraph_mode": Graphs.NONE} | changes
    compilation = SimpleNamespace(
        static_forward_context=dict.fromkeys(layers, attention), **settings
    )
    layer = check_layer_of(compilation, layers, index)
    assert math.isclose(layer.scale, 0.125)
    return layer.name


@pytest.mark.parametrize(
    ("windows", "index", "expected"),
    [
        *(([0] * 30, None, "18"), ([0] * 4, None, "2"), ([0], None, "0")),
        *(([64, 0] * 3, None, "3"), ([64] * 5 + [0], None, "5"), ([0] * 30, 7, "7")),
    ],
)
def test_the_default_layer_has_full_attention_and_lies_three_fifths_into_the_model(
    windows: list[int], index: int | None, expected: str
) -> None:
    assert choose(windows, index) == expected


@pytest.mark.parametrize(
    "compiled",
    [
        {"mode": 0, "use_direct_call": True},
        {"mode": 2},
        {"mode": 3, "cudagraph_mode": Graphs.PIECEWISE},
        {"mode": 3, "cudagraph_mode": Graphs.FULL_AND_PIECEWISE},
        {"cudagraph_mode": Graphs.FULL_DECODE_ONLY},
        {"cudagraph_mode": None},
    ],
)
def test_attention_may_be_called_by_a_compiled_model(compiled: dict[str, Any]) -> None:
    assert choose([0], **compiled) == "0"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"windows": [0, 0], "index": 2}, "expected one of the layers with full attention"),
        ({"windows": [64, 0], "index": 0}, "expected one of the layers with full attention"),
        ({"windows": [64, 64]}, "found windows or latents in all 2"),
        ({"windows": [0, 0], "has_values": False}, "found windows or latents in all 2"),
        ({"windows": [0], "mode": 3, "use_direct_call": True}, "found compilation mode 3"),
        ({"windows": [0], "cudagraph_mode": Graphs.FULL}, "found cudagraph_mode Graphs.FULL"),
        ({"windows": [0], "impl": None}, "with a scale"),
        ({"windows": [0], "impl": SimpleNamespace(scale=None)}, "with a scale"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(BlendingError, match=expected):
        choose(**arguments)
