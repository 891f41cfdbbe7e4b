# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Engines with KvextConnector, compared with an engine without package, connector and cache.

    python tests/gpu/check_engines.py --device cuda --case "windows, float32" [--quick] ROWS

Prompts and scenarios are those of the tests on CPUs and on the emulated NPU. The reference gets the
served tokens, so that all steps of a reply can be compared.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# ``tests`` replaces this folder on the path.
_HERE = Path(__file__).resolve().parent
TESTS = _HERE.parent
sys.path[:] = [*(path for path in sys.path if path != str(_HERE)), str(TESTS)]
sys.path.append(str(TESTS / "emulated_npu"))

import random_models  # noqa: E402
from gpu.sections import LEFT_OUT, MEASURED, OK, WRONG, Rows  # noqa: E402
from support.scenarios import processes  # noqa: E402
from support.scenarios.answers import Answer, Served  # noqa: E402
from support.scenarios.connector import HOLES_TOKENS  # noqa: E402
from support.scenarios.documents import SEPARATOR  # noqa: E402
from support.scenarios.processes import (  # noqa: E402
    ADAPTIVE,
    ENGINE_ENVIRON,
    NO_PREFIX_CACHING,
    PLUGIN_OFF,
    Plan,
    Platform,
)
from support.scenarios.taught import Steps, taught_error  # noqa: E402

TOLERANCES = {"float32": 0.02, "bfloat16": 0.25}
"""The largest allowed difference of a log-probability. Triton multiplies float32 with ten bits of
mantissa. A wrong block makes 1 to 3."""
NOISE_FACTOR = 4
"""A difference may be this many times as large as the largest one of answers without any hit, which
rounding alone makes."""
CONTROL_FACTOR = 2
"""A control must differ by this many tolerances."""

WITHOUT_HITS = ("cold", "first question", "before intact")
DAMAGED = ("zeroed rows", "swapped rows", "zeroed tails", "swapped tails")
FEATURES = ("turns", "document", "salts", "damage", "failures", "holes")
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
POOL = {"num_gpu_blocks_override": 700}
CROWDED_TOKENS = {1: 3072, 2: 5632, 4: 8192, 6: 5600}
"""The size of a pool that is too small for the scenario ``storm``, by KV cache groups."""

ENVIRON: Mapping[str, Mapping[str, str]] = {
    "eager": {},
    "graphs": {
        "TORCHDYNAMO_DISABLE": "0",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        # Several processes compile at once.
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
    },
}
"""Variables of a process, by the mode of its engines."""

ON_DEVICE: Mapping[str, Mapping[str, Any]] = {
    "cpu": {},
    "npu": {},
    # Several engines share the card. With its size given, the cache needs no profile of memory.
    "cuda": {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 1 << 30},
}


def full_attention() -> Any:
    return random_models.full_attention()


def windows() -> Any:
    return random_models.windows()


def let_last_layer_tell_more(name: str, parameter: Any) -> None:
    """Let the one layer without a window count for more, so that a few wrong rows of it show."""
    if name.endswith("layers.5.post_attention_layernorm.weight"):
        parameter.add_(3.0)  # The norm multiplies by one more than its weight.


def states() -> Any:
    """With all experts of a layer at work: rounding would choose others of them."""
    config = random_models.states()
    config.num_experts_per_tok = config.num_experts
    return config


def sharpen(name: str, parameter: Any) -> None:
    """Let states last, the layer with attention look at few tokens, and both count for more."""
    if name.endswith("self_attn.q_norm.weight"):
        parameter.add_(3.0)  # The norm multiplies by one more than its weight.
    elif name.endswith("linear_attn.A_log"):
        parameter.sub_(4.0)  # Its exponential is how fast a state is forgotten.
    elif name.endswith(("self_attn.o_proj.weight", "linear_attn.out_proj.weight")):
        parameter.mul_(3.0)


def latent() -> Any:
    """Without experts."""
    config = random_models.latent()
    config.first_k_dense_replace = config.num_hidden_layers
    return config


@dataclass(frozen=True)
class Case:
    """One model, served in one type.

    Attributes:
        block_tokens: The block size on a GPU.
        has_tails: Whether host memory holds pages for boundaries only, of windows or states.
        blends: Whether segments are reused approximately, in place of all else.
        change: Changes weights by their names, so that a small part of wrong KV shows, too.
    """

    config: Callable[[], Any]
    dtype: str
    num_groups: int
    block_tokens: int = 16
    has_holes: bool = True
    has_tails: bool = False
    blends: bool = False
    change: Callable[[str, Any], object] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    engine_on_gpu: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]


CASES: Mapping[str, Case] = {
    "full attention, bfloat16": Case(full_attention, "bfloat16", 1),
    "windows, bfloat16": Case(
        windows, "bfloat16", 6, has_tails=True, change=let_last_layer_tell_more
    ),
    "states, bfloat16": Case(
        states,
        "bfloat16",
        4,
        block_tokens=128,
        has_holes=False,
        has_tails=True,
        change=sharpen,
        # vLLM caches no prefixes of such a model unless an argument says so. Parts of prompts are
        # whole blocks.
        engine={"enable_prefix_caching": True, "max_num_batched_tokens": 512},
        # vLLM's first choice on some cards is FlashInfer, which is not brought along.
        engine_on_gpu={"gdn_prefill_backend": "triton", "moe_backend": "triton"},
    ),
    "latent attention, bfloat16": Case(latent, "bfloat16", 1),
    # vLLM has its V2 runner for such a model, unless it is told otherwise.
    "full attention, float32": Case(full_attention, "float32", 1, environ=V1_RUNNER),
    "windows, float32": Case(
        windows, "float32", 6, has_tails=True, change=let_last_layer_tell_more
    ),
    "blending, float32": Case(full_attention, "float32", 1, blends=True),
}


class Checks:
    """The engines of one case on one device."""

    def __init__(self, name: str, device: str, rows: Rows, folder: Path, *, is_quick: bool) -> None:
        self.case = CASES[name]
        self.device = device
        self.rows = rows
        self.folder = folder
        self.is_quick = is_quick
        self.model = folder / "model"
        model = random_models.write(self.model, self.case.config())
        if self.case.change is not None:
            for parameter_name, parameter in model.named_parameters():
                self.case.change(parameter_name, parameter.detach())
            model.save_pretrained(self.model)
        block_tokens = self.case.block_tokens if device == "cuda" else processes.CPU.block_tokens
        if device == "npu":
            block_tokens = processes.NPU.block_tokens
        environ = processes.NPU.environ if device == "npu" else ENGINE_ENVIRON
        self.platform = Platform(
            block_tokens, (), {**environ, "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1"}
        )

    def plan(
        self, scenarios: Sequence[str], module: str, *engine: Mapping[str, Any], **options: Any
    ) -> Plan:
        arguments: dict[str, Any] = {
            "dtype": "float32" if self.device == "npu" else self.case.dtype,
            **POOL,
            **ON_DEVICE[self.device],
            **self.case.engine,
            **(self.case.engine_on_gpu if self.device == "cuda" else {}),
        }
        for each in engine:
            arguments |= each
        return Plan(self.model, scenarios, module, arguments, options)

    def connector(self, **extra: Any) -> dict[str, Any]:
        options = {"host_memory_gib": 0.24, "store_policy": "all", **extra}
        return self._allowed(processes.connector(**options))

    def blending(self) -> dict[str, Any]:
        return self._allowed(processes.blending(separator=SEPARATOR, learn=False))

    def _allowed(self, made: dict[str, Any]) -> dict[str, Any]:
        if self.device == "cuda":
            made["kv_transfer_config"]["kv_connector_extra_config"]["allow_cuda"] = True
        return made

    def serve(self, plans: Mapping[str, Plan], environ: Mapping[str, str]) -> dict[str, Served]:
        """Serve plans in one process. A failed plan becomes a row, and is left out."""
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        of_plans = self.folder / "plans.json"
        found = {name: plan.on(self.platform) for name, plan in plans.items()}
        of_plans.write_text(json.dumps(found))
        script = TESTS / "support" / "scenarios" / "serve.py"
        ended = processes.run(script, [str(report), str(of_plans)], environ, self.platform)
        print(ended.log[-20_000:], flush=True)
        if not report.exists():
            error = f"exit code {ended.exit_code}: {ended.log[-700:]}"
            reports = {name: {"error": error} for name in plans}
        else:
            reports = json.loads(report.read_text())
        for name, each in reports.items():
            if "error" in each:
                self.rows.add(f"{name}: the engine serves", WRONG, each["error"][-700:])
        return {
            name: Served(each, ended.log) for name, each in reports.items() if "error" not in each
        }

    # The same answers as without a cache.

    def run(self, mode: str) -> None:
        """Serve with the connector, and compare. ``mode`` is ``eager`` or ``graphs``."""
        engine = {"enforce_eager": mode == "eager"}
        if self.case.blends:
            self._run_blending(mode, engine)
            return
        features = self.features
        plans = {mode: self.plan(features, "connector", self.connector(), engine)}
        if not self.is_quick and mode == "eager":
            small = self.connector(host_memory_gib=1 / 256)
            crowded = {
                "num_gpu_blocks_override": CROWDED_TOKENS[self.case.num_groups]
                // self.platform.block_tokens
            }
            plans[f"{mode}, crowded"] = self.plan(
                ("storm", "eviction"), "connector", small, engine, crowded
            )
        found = self.serve(plans, {**ADAPTIVE, **ENVIRON[mode], **self.case.environ})
        self._note_engine(mode, found)
        expected = self.teach(found.values())
        if expected is None:
            return
        for name, served in found.items():
            self._compare(name, served, expected)
        if mode in found:
            self._check_features(mode, found[mode])
        crowd = found.get(f"{mode}, crowded")
        if crowd is not None:
            self._check_crowd(f"{mode}, crowded", crowd)

    @property
    def features(self) -> tuple[str, ...]:
        return ("turns", "damage") if self.is_quick else FEATURES

    def teach(self, found: Iterable[Served]) -> dict[tuple[int, ...], Steps] | None:
        """What the reference says of every sequence that was served; None if it fails."""
        begins = {
            (*answer.prompt, *answer.reply): len(answer.prompt)
            for served in found
            for label in served.labels
            for answer in served.answers(label)
        }
        sequences = list(begins.items())
        plan = self.plan(("teach",), "taught", NO_PREFIX_CACHING, sequences=sequences)
        reports = self.serve({"the reference": plan}, {**PLUGIN_OFF, **V1_RUNNER})
        if not reports:
            return None
        steps = reports["the reference"].report["facts"]["steps"]
        return {sequence: each for (sequence, _), each in zip(sequences, steps, strict=True)}

    def _compare(
        self, name: str, served: Served, expected: Mapping[tuple[int, ...], Steps]
    ) -> None:
        errors = {
            label: [
                taught_error(answer, expected[(*answer.prompt, *answer.reply)])
                for answer in served.answers(label)
            ]
            for label in served.labels
        }
        noise = max((max(errors[label]) for label in WITHOUT_HITS if label in errors), default=0.0)
        tolerance = max(self.case.tolerance, NOISE_FACTOR * noise)
        right = {label: max(of) for label, of in errors.items() if not self._is_control(label)}
        worst = max(right, key=right.__getitem__)
        num_steps = sum(len(answer.reply) for label in right for answer in served.answers(label))
        found = (
            f"largest difference {right[worst]:.4f} ({worst}) of {num_steps} steps; without hits "
            f"{noise:.4f}; allowed {tolerance:.4f}"
        )
        self.rows.check(
            f"{name}: answers are those without a cache",
            right[worst] <= tolerance,
            found,
            errors=errors,
        )
        controls = {label: max(of) for label, of in errors.items() if self._is_control(label)}
        holes = [controls.pop(label) for label in [*controls] if label.startswith("hole")]
        wanted = CONTROL_FACTOR * tolerance
        if holes:
            what = f"{name}, control: holes that are not computed are seen"
            self.rows.check(what, max(holes) > wanted, f"{max(holes):.2f}, at least {wanted:.2f}")
        for label, error in controls.items():
            what = f"{name}, control: {label} are seen"
            self.rows.check(what, error > wanted, f"{error:.2f}, at least {wanted:.2f}")
        try:
            served.check_nothing_is_left()
            self.rows.add(f"{name}: nothing is held in the end", OK)
        except AssertionError as error:
            self.rows.add(f"{name}: nothing is held in the end", WRONG, str(error))

    def _is_control(self, label: str) -> bool:
        if label.startswith("hole left out"):
            return self.case.has_holes
        if label in ("zeroed tails", "swapped tails"):
            return self.case.has_tails
        return label in DAMAGED

    def _check_features(self, name: str, found: Served) -> None:
        """Check that the engine did what the scenarios are named for."""
        own = found.report["own"]
        num_groups = found.report["num_groups"]
        hits = {label: sum(found.hit_tokens(label)) for label in ("warm", "twice", "second turn")}
        self.rows.check(
            f"{name}: prompts hit host memory",
            min(hits.values()) > 0,
            f"{hits}, {num_groups} groups",
        )
        self.rows.check(
            f"{name}: the model has the expected groups",
            num_groups == self.case.num_groups,
            f"{num_groups}, expected {self.case.num_groups}",
        )
        if "failures" in self.features:
            failed = [own[f"transfer_failures.{way}"] for way in ("store", "load")]
            found_text = f"{failed[0]} stores and {failed[1]} loads failed"
            self.rows.check(f"{name}: copies failed as planned", min(failed) > 0, found_text)
        if "holes" in self.features:
            labels = [f"hole: {hole}" for hole in HOLES_TOKENS]
            tokens = found.counted_in_all("hole tokens", labels)
            what = f"{name}: holes are computed" if self.case.has_holes else f"{name}: no holes"
            self.rows.check(what, (tokens > 0) is self.case.has_holes, f"{tokens} tokens")

    def _check_crowd(self, name: str, found: Served) -> None:
        own = found.report["own"]
        preemptions = found.counted("storm", "preemptions")
        swapped = own["host_swapped_requests"]
        evicted = own["host_removed_entries.evicted"]
        self.rows.check(
            f"{name}: preempted requests come back from host memory",
            min(preemptions, swapped, evicted) > 0,
            f"{preemptions} preemptions, {swapped} swapped, {evicted} entries evicted",
        )

    def _note_engine(self, mode: str, found: Mapping[str, Served]) -> None:
        """What the log says about attention and graphs."""
        served = next(iter(found.values()), None)
        log = served.log if served else ""
        runner = "V2" if served and served.report["is_v2_runner"] else "V1"
        facts = dict.fromkeys(
            " ".join(match.group(0).split())
            for match in re.finditer(
                r"Using \S+ (?:attention|MLA|GDN)[^\n]{0,60}|cudagraph_mode[^,\n]{0,60}"
                r"|Graph capturing finished[^\n]{0,60}",
                log,
            )
        )
        self.rows.add(f"{mode}: engine", MEASURED, "; ".join([f"{runner} runner", *facts][:6]))

    # Segments.

    def _run_blending(self, mode: str, engine: Mapping[str, Any]) -> None:
        from support.blending.oracle import Oracle
        from support.blending.served import MAX_TOKENS, expected_reuse, num_tokens, oracle_error

        head_tokens = 16
        plan = self.plan(
            ("orders",) if self.is_quick else ("orders", "exact", "controls"),
            "blending",
            self.blending(),
            engine,
            heads=[head_tokens],
        )
        found = self.serve({mode: plan}, ENVIRON[mode]).get(mode)
        self._note_engine(mode, {mode: found} if found else {})
        if found is None:
            return
        oracle = Oracle(self.model, found.report["facts"]["sinks"], MAX_TOKENS)
        errors: list[float] = []
        untouched: list[float] = []
        reuse: list[tuple[int, int]] = []
        for answer in found.answers(f"heads {head_tokens}"):
            if answer.params is None:
                continue
            reused = expected_reuse(answer, head_tokens)
            reuse.append((answer.reused_tokens, num_tokens(reused)))
            errors.append(oracle_error(oracle, answer, reused))
            untouched.append(oracle_error(oracle, answer, []))
        tolerance = self.case.tolerance
        self.rows.check(
            f"{mode}: blended answers are those of the oracle",
            bool(errors) and max(errors) <= tolerance,
            f"largest difference {max(errors):.4f} of {len(errors)} answers, allowed {tolerance}",
        )
        self.rows.check(
            f"{mode}: as many tokens are reused as expected",
            all(one == other > 0 for one, other in reuse),
            f"{sum(one for one, _ in reuse)} tokens",
        )
        wanted = CONTROL_FACTOR * tolerance
        self.rows.check(
            f"{mode}, control: blended answers are not those of a full computation",
            min(untouched) > wanted,
            f"smallest difference {min(untouched):.2f}, at least {wanted:.2f}",
        )
        for label in found.labels:
            if label.startswith("wrong: "):
                self._check_wrong(mode, label, found.answers(label), oracle, head_tokens)
        self._check_exact(mode, found)

    def _check_wrong(
        self, mode: str, label: str, answers: Sequence[Answer], oracle: Any, head_tokens: int
    ) -> None:
        from support.blending.served import expected_reuse, oracle_error

        wanted = CONTROL_FACTOR * self.case.tolerance
        error = min(
            oracle_error(oracle, each, expected_reuse(each, head_tokens)) for each in answers
        )
        what = f"{mode}, control: {label.removeprefix('wrong: ')} is seen"
        self.rows.check(what, error > wanted, f"{error:.2f}, at least {wanted:.2f}")

    def _check_exact(self, mode: str, found: Served) -> None:
        labels = [label for label in found.labels if label.startswith("exact")]
        if not labels:
            self.rows.add(f"{mode}: prompts without approximate reuse", LEFT_OUT, "quick")
            return
        of_labels = {label: found.report["asked"][label] for label in labels}
        only = Served({**found.report, "asked": of_labels}, found.log)
        expected = self.teach([only])
        if expected is not None:
            self._compare(f"{mode}, without approximate reuse", only, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), required=True)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--mode", action="append", choices=("eager", "graphs"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("rows", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(
            options.case,
            options.device,
            Rows(options.rows),
            Path(folder),
            is_quick=options.quick,
        )
        for mode in options.mode or ("eager", "graphs"):
            checks.run(mode)


if __name__ == "__main__":
    main()
