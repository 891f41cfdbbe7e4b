# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The command lines of vLLM-Ascend's tutorials, and how they start with small models.

``tools/official_lines.py`` reads the lines. Each is started without this package, with retention,
with KvextConnector, and with both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from support.official_lines.families import NUM_LAYERS, family_of, slug

DATA = Path(__file__).parent
RELEASES = ("0.23.0", "0.30.0rc2")

OFF = {"VLLM_ASCEND_KVEXT_MODE": "off"}
ADAPTIVE = {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"}
BOTH = "both"
ARMS: Mapping[str, tuple[Mapping[str, str], bool]] = {
    "without": (OFF, False),
    "retention": (ADAPTIVE, False),
    "connector": ({}, True),
    BOTH: (ADAPTIVE, True),
}
"""By name: the variables of this package, and whether the line gets a KvextConnector."""

OF_A_NODE = frozenset(
    {
        "compilation-config",
        "data-parallel-size",
        "decode-context-parallel-size",
        "cp-kv-cache-interleave-size",
        "distributed-executor-backend",
        "gpu-memory-utilization",
        "kv-cache-memory-bytes",
        "pipeline-parallel-size",
        "kv-cache-dtype",
        "prefill-context-parallel-size",
        "quantization",
        "tensor-parallel-size",
    }
)
"""Flags that the stage ``engine`` leaves out."""
SMALL: Mapping[str, Any] = {
    "distributed-executor-backend": "support.scenarios.own_config.OwnConfigExecutor",
    "dtype": "float32",
    "enforce-eager": True,
    "load-format": "dummy",
    "max-model-len": "8192",
    "max-num-batched-tokens": "512",
    "max-num-seqs": "8",
    "num-gpu-blocks-override": "400",
}
"""Flags of the stage ``engine``."""
MORE_BLOCKS: Mapping[str, Any] = {"num-gpu-blocks-override": "900"}
"""The pool of DeepSeek-V4, whose blocks of some groups have few tokens."""

OWN_CONNECTOR: Mapping[str, Any] = {
    "kv_connector": "KvextConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_memory_gib": 0.25},
}


@dataclass(frozen=True)
class OfficialLine:
    """One distinct set of flags of a tutorial.

    Attributes:
        release: The release of vLLM-Ascend.
        page: The tutorial.
        numbers: The numbers of its lines with these flags.
        flags: Values by flag. ``True``: a flag without value. None: a launcher gives the value.
        environ: The variables of the line.
    """

    release: str
    page: str
    numbers: Sequence[int]
    flags: Mapping[str, Any]
    environ: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.page}:{self.numbers[0]}"

    @property
    def family(self) -> str:
        return family_of(self.page)

    @property
    def transfer_config(self) -> Mapping[str, Any]:
        return self.flags.get("kv-transfer-config") or {}

    @property
    def role(self) -> str:
        """``P`` or ``D`` for nodes of a deployment with separate nodes for prompts and answers."""
        roles = {"kv_producer": "P", "kv_consumer": "D"}
        return roles.get(self.transfer_config.get("kv_role", ""), "")

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of parallelism. A size of a launcher is that of the node's role."""
        extra = self.transfer_config.get("kv_connector_extra_config") or {}
        children = [
            extra,
            *(c.get("kv_connector_extra_config") or {} for c in extra.get("connectors", ())),
        ]
        node = "decode" if self.role == "D" else "prefill"
        given = next((each[node] for each in children if node in each), {})
        sizes = {}
        for kind, short in (("tensor", "tp"), ("data", "dp"), ("pipeline", "pp")):
            flag = f"{kind}-parallel-size"
            value = self.flags.get(flag, 1)
            sizes[flag] = int(given.get(f"{short}_size", 1) if value is None else value)
        return sizes

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables of the line. Stages of a pipeline share the layers of the small model."""
        partition = "VLLM_PP_LAYER_PARTITION"
        if partition not in self.environ:
            return self.environ
        num_stages = self.environ[partition].count(",") + 1
        parts = ",".join([str(NUM_LAYERS // num_stages)] * num_stages)
        return {**self.environ, partition: parts}

    def arguments(self, models: Path, arm: str, stage: str) -> list[str]:
        """The words behind ``vllm serve``.

        The stage ``configuration`` keeps all sizes. The stage ``engine`` has one device, a small
        step, and no graphs.

        Args:
            models: The folder of `families.write_configs`.
            arm: A key of `ARMS`.
        """
        flags = dict(self.flags) | {
            name: str(size) for name, size in self.sizes.items() if name in self.flags
        }
        if ARMS[arm][1]:
            flags["kv-transfer-config"] = self.with_own_connector()
        speculative = flags.get("speculative-config")
        if speculative and "model" in speculative:
            draft = str(models / slug(speculative["method"]))
            flags["speculative-config"] = speculative | {"model": draft}
        if stage == "engine":
            flags = {name: value for name, value in flags.items() if name not in OF_A_NODE}
            flags |= SMALL
            if self.family.startswith("DeepSeek-V4"):
                flags |= MORE_BLOCKS
        words = [str(models / slug(self.family)), "--skip-tokenizer-init"]
        for name, value in flags.items():
            words.append(f"--{name}")
            if value is not True:
                words.append(value if isinstance(value, str) else json.dumps(value))
        return words

    def with_own_connector(self) -> Mapping[str, Any]:
        """The line's transfer config with KvextConnector.

        A connector of another node stays first, so that it is asked first.
        """
        other = self.transfer_config
        if not other:
            return OWN_CONNECTOR
        if other["kv_connector"] == "MultiConnector":
            children = other["kv_connector_extra_config"]["connectors"]
            rest = other
        else:
            children = [other]
            rest = {"kv_connector": "MultiConnector", "kv_role": other["kv_role"]}
        extra = dict(rest.get("kv_connector_extra_config") or {})
        # vLLM-Ascend reads the sizes of both kinds of nodes from the outer connector.
        extra |= {
            k: v
            for k, v in (other.get("kv_connector_extra_config") or {}).items()
            if k in ("prefill", "decode")
        }
        extra["connectors"] = [*children, OWN_CONNECTOR]
        return {
            **rest,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }


def official_lines(release: str) -> list[OfficialLine]:
    """The distinct sets of flags of a release's tutorials."""
    return [
        OfficialLine(release, entry["page"], entry["lines"], entry["flags"], entry["environ"])
        for entry in json.loads((DATA / f"{release}.json").read_text())
    ]


def known_outcomes(release: str) -> dict[str, dict[str, str]]:
    """The outcomes that are kept, by line and arm. `outcomes` says what their texts mean."""
    kept = json.loads(_outcomes_file(release).read_text())
    return {
        name: {arm: of_arms.get(arm, of_arms[BOTH]) for arm in ARMS}
        for name, of_arms in kept.items()
    }


def keep_outcomes(release: str, found: Mapping[str, Mapping[str, str]]) -> None:
    """Keep outcomes. An arm with the outcome of the arm ``both`` is left out."""
    rows = []
    for name, of_arms in found.items():
        kept = {
            arm: of_arms[arm] for arm in of_arms if arm == BOTH or of_arms[arm] != of_arms[BOTH]
        }
        rows.append(f"{json.dumps(name)}: {json.dumps(kept)}")
    text = ",\n".join(rows)
    _outcomes_file(release).write_text(f"{{\n{text}\n}}\n")


def _outcomes_file(release: str) -> Path:
    return DATA / f"outcomes-{release}.json"
