# SPDX-License-Identifier: Apache-2.0
"""Where holes are computed, and where not, for `status`: what is known without an engine.

An engine decides when it starts, and says so in its log; what requests do is in its metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_kvext.compat import Upstream
from vllm_ascend_kvext.features import CONNECTOR
from vllm_ascend_kvext.holes.eligibility import EngineRefusal, HoleRefusal
from vllm_ascend_kvext.settings import HOLE_REUSE_VARIABLE, HoleReuse, Mode, Settings

REFUSALS_METRIC = "vllm:kvext_host_hole_refusals_total"

_ASCEND_SCHEDULERS = (
    (
        "balance",
        "computed",
        "a step with rows does not count as a full batch when ranks are balanced",
    ),
    (
        "profiling-chunk",
        "does not start",
        "it needs pipeline parallelism, which KvextConnector refuses",
    ),
    ("recompute", "does not start", "it needs kv_role=kv_consumer, which KvextConnector refuses"),
    (
        "dynamic-batch",
        "does not start",
        "vLLM 0.23.0 gives it hash_block_size, which it does not take",
    ),
)
"""Of vLLM-Ascend 0.23.0, that have a ``schedule`` of their own."""

HOLES_HEADER = ("holes of", "are", "reason", "a running engine says so in")


@dataclass(frozen=True, slots=True)
class HoleRow:
    """One line of the report.

    Attributes:
        what: A setting, scheduler, engine or request.
        holes: ``computed``, or what becomes of it.
        reason: Why, or what to know.
        said_by: Where a running engine says so.
    """

    what: str
    holes: str
    reason: str
    said_by: str


def describe_holes(settings: Settings, upstream: Upstream) -> list[HoleRow]:
    """The setting, the schedulers of this upstream, and what engines and requests are refused for.

    Nothing if there is no KvextConnector. Its option ``hole_reuse``, which comes before the
    variable, is not known here.
    """
    if settings.mode is Mode.OFF or CONNECTOR.name in settings.disabled:
        return []
    switch = HoleReuse.ON if settings.reuses_holes else HoleReuse.OFF
    of_setting = "computed with KvextConnector" if settings.reuses_holes else "not computed"
    reason = f"{HOLE_REUSE_VARIABLE}={switch.value}; its option hole_reuse comes first"
    rows = [HoleRow("setting", of_setting, reason, "")]
    if not settings.reuses_holes:
        return rows
    rows.append(HoleRow("scheduler of vLLM", "computed", "", ""))
    if upstream.vllm_ascend is not None:
        rows += [
            HoleRow(
                f"scheduler {name} of vLLM-Ascend", holes, reason, "error" * (holes != "computed")
            )
            for name, holes, reason in _ASCEND_SCHEDULERS
        ]
    rows.append(
        HoleRow(
            "engine: parallel",
            "does not start",
            "KvextConnector refuses pipeline and context parallelism",
            "error",
        )
    )
    rows += [
        HoleRow(f"engine: {refusal.value}", "not computed", refusal.text, "log: hole_reuse is off")
        for refusal in EngineRefusal
    ]
    rows += [
        HoleRow(
            f"request: {refusal.value}",
            "not computed",
            refusal.text,
            f'{REFUSALS_METRIC}{{reason="{refusal.value}"}}',
        )
        for refusal in HoleRefusal
    ]
    return rows
