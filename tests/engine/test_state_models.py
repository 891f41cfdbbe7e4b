# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Models with states on the real engine, with and without drafts: hits change no answer.

Each cell of a table is an engine: a model, where drafts come from, whether scheduling is
asynchronous, and what this package does. Its answers for prompts that are new, that the device has
cached, that come from host memory, and that are next turns are compared with those of an engine
without the plugin, prefix caching and drafts. ``KVEXT_RUNNER=v2`` runs the table with vLLM's V2
model runner. ``KVEXT_CASES=all`` runs all cells; other runs leave out most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.sample import IS_LONG
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.processes import (
    ADAPTIVE,
    IS_V2_RUNNER,
    NO_PREFIX_CACHING,
    PLUGIN_OFF,
    LazyReports,
    Plan,
)
from support.scenarios.states import (
    KNOWN,
    MTP,
    NGRAM,
    NO_DRAFTS,
    RUNNER_ENVIRON,
    SIBLING_BLOCKS,
    plan,
)
from support.states import state_models
from support.upstream_version import IS_SINCE_0_30

pytestmark = pytest.mark.timeout(1200)

BLOCK_TOKENS = (
    {"qwen3-next": 32, "falcon-h1": 96, "granite": 96, "nemotron-h": 96}
    if IS_SINCE_0_30
    else {"qwen3-next": 16}
)
"""The size of a state's block, by model. Release 0.23 has no Mamba2 on a CPU."""

KINDS: dict[str, Mapping[str, str]] = {
    "default": {},
    "adaptive": ADAPTIVE,
    "connector": {},
    "both": ADAPTIVE,
}
"""The environment of engines, by what this package does."""

CONTROLS = ("zeroed states", "foreign states")
HOST_CONTROLS = ("zeroed states, host", "foreign states, host", "loads of nothing")
VISIBLE = 100 * LOGPROB_TOLERANCE
"""The smallest difference that a wrong state must make."""


class Cell(NamedTuple):
    """An engine of the table, see the module."""

    model: str
    drafts: str = NO_DRAFTS
    is_async: bool = False
    kind: str = "both"

    @property
    def name(self) -> str:
        order = "asynchronous" if self.is_async else "synchronous"
        return f"{self.model}, {self.drafts or 'no'} drafts, {order}, {self.kind}"

    @property
    def has_connector(self) -> bool:
        return self.kind in ("connector", "both")

    @property
    def engine(self) -> dict[str, Any]:
        """The arguments of the engine for what this package does."""
        chunk_tokens = max(128 // self.block_tokens, 1) * self.block_tokens
        return processes.connector(chunk_tokens=chunk_tokens) if self.has_connector else {}

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS[self.model]


def cells() -> Iterator[Cell]:
    """All cells in which vLLM itself answers right without this package.

    Not in the table:

    - drafts with Mamba2, because the CPU's convolution ignores how many drafts were accepted;
    - drafts on release 0.23, whose CPU engine then answers hits wrong, also without this
      package;
    - drafts by n-grams, see `test_stock_is_wrong_if_some_steps_have_no_drafts`. Known drafts have
      their place. The V2 runner and asynchronous scheduling take neither;
    - asynchronous scheduling on release 0.23, whose runner for CPUs has no streams.
    """
    orders = (False, True) if IS_SINCE_0_30 else (False,)
    for model, is_async, kind in product(BLOCK_TOKENS, orders, KINDS):
        of_model = [NO_DRAFTS]
        if model == "qwen3-next" and IS_SINCE_0_30:
            of_model += [MTP] if is_async or IS_V2_RUNNER else [MTP, KNOWN]
        for drafts in of_model:
            yield Cell(model, drafts, is_async, kind)


SAMPLE = {
    Cell("qwen3-next"),
    Cell("qwen3-next", MTP),
    Cell("qwen3-next", KNOWN),
    Cell("qwen3-next", is_async=True),
    Cell("falcon-h1"),
}
"""The cells of `make test`."""

HAS_NGRAM = IS_LONG and IS_SINCE_0_30 and not IS_V2_RUNNER
CELLS = {cell.name: cell for cell in cells() if IS_LONG or cell in SAMPLE}
"""The cells of this run, by name."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> LazyReports:
    """Reports by the name of a cell, and the references by model and whether it has drafts."""

    @cache
    def folder_of(model: str, has_drafts: bool) -> Path:
        return state_models.write(tmp_path_factory.mktemp("model"), model, has_drafts)

    def plan_of(cell: Cell, drafts: str, **engine: Any) -> Plan:
        return plan(
            lambda: folder_of(cell.model, bool(cell.drafts)),
            ["sightings", "controls"],
            drafts,
            cell.is_async,
            cell.block_tokens,
            **engine,
        )

    references = {
        reference_of(cell): plan_of(cell._replace(is_async=False), NO_DRAFTS, **NO_PREFIX_CACHING)
        for cell in CELLS.values()
    }
    started = [(PLUGIN_OFF | RUNNER_ENVIRON, references)]
    for kind, environ in KINDS.items():
        chosen = {name: cell for name, cell in CELLS.items() if cell.kind == kind}
        plans = {name: plan_of(cell, cell.drafts, **cell.engine) for name, cell in chosen.items()}
        started.append(({**environ, **RUNNER_ENVIRON}, plans))
    if HAS_NGRAM:
        by_ngrams = plan_of(Cell("qwen3-next", NGRAM), NGRAM, **NO_PREFIX_CACHING)
        started.append((PLUGIN_OFF | RUNNER_ENVIRON, {"n-grams": by_ngrams}))
    # One process per engine keeps each within the time that a test may take.
    each = [(environ, {name: of[name]}) for environ, of in started for name in of]
    return LazyReports(tmp_path_factory, each if IS_LONG or IS_V2_RUNNER else started)


def reference_of(cell: Cell) -> str:
    weights = "large embeddings" if cell.drafts else "plain"
    return f"reference, {cell.model}, {weights}"


@pytest.fixture(params=CELLS)
def cell(request: pytest.FixtureRequest) -> Cell:
    return CELLS[request.param]


@pytest.fixture
def served(cell: Cell, reports: LazyReports) -> Served:
    return reports[cell.name]


@pytest.fixture
def reference(cell: Cell, reports: LazyReports) -> Served:
    """The same model without plugin, prefix caching and drafts."""
    return reports[reference_of(cell)]


def test_engines_are_what_cells_say(cell: Cell, served: Served) -> None:
    report = served.report
    assert report["state block tokens"] == cell.block_tokens
    assert report["mode"] == "align"
    assert report["is_async"] is cell.is_async
    assert report["is_v2_runner"] is IS_V2_RUNNER
    accepted = served.counted_in_all("accepted draft tokens")
    assert (accepted > 0) is bool(cell.drafts)
    if cell.drafts:
        assert 0.02 < accepted / served.counted_in_all("draft tokens") < 1


def test_hits_change_no_answer(
    cell: Cell, served: Served, reference: Served, record_property: Callable[[str, Any], None]
) -> None:
    labels = [label for label in served.labels if label not in (*CONTROLS, *HOST_CONTROLS)]
    largest = served.check_equal(reference, labels)
    control = min(served.logprob_error(label, reference) for label in controls_of(cell))
    record_property("largest error, control", (largest, control))
    print(f"\nROW {cell.name}: {largest:.1e}, control {control:.1e}")


def test_prompts_hit_states(cell: Cell, served: Served) -> None:
    block = cell.block_tokens
    assert sum(hit >= 2 * block for hit in served.hit_tokens("device")) >= 2
    assert all(hit % block == 0 for label in served.labels for hit in served.hit_tokens(label))
    hosts = [served.hit_tokens(label) for label in ("host", "next turn, host")]
    if cell.has_connector:
        assert min(map(sum, hosts)) >= 8 * block
        assert served.report["own"]["host_hit_requests"] > 0
        return
    for *others, sibling in hosts:
        # The device's cache was empty. The last prompt may wait until another one, asked at the
        # same time, has left a state in what they share. Dense caching keeps it, an interval not.
        assert not any(others)
        assert sibling <= SIBLING_BLOCKS * block


@pytest.mark.skipif(not HAS_NGRAM, reason="only the long form, with the V1 runner of 0.30")
def test_stock_is_wrong_if_some_steps_have_no_drafts(reports: LazyReports) -> None:
    """vLLM then reads the state before the drafts that it has accepted in the last step.

    N-grams propose nothing in some steps. No plugin and no prefix caching is needed.
    """
    found = reports["n-grams"]
    reference = reports[reference_of(Cell("qwen3-next", MTP))]
    assert found.counted_in_all("accepted draft tokens") > 0
    assert max(found.logprob_error(label, reference) for label in found.labels) > VISIBLE


def test_nothing_is_left(served: Served) -> None:
    served.check_nothing_is_left()


def controls_of(cell: Cell) -> tuple[str, ...]:
    return CONTROLS + (HOST_CONTROLS if cell.has_connector else ())


def test_wrong_states_show(cell: Cell, served: Served, reference: Served) -> None:
    for label in controls_of(cell):
        assert min(served.hit_tokens(label)) > 0, label
        assert min(served.logprob_errors(label, reference)) > VISIBLE, label
