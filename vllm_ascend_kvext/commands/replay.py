# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Play a log of requests through vLLM's scheduler, without a model or a device.

    python -m vllm_ascend_kvext replay TRACE --model-config DIR --blocks N [--host-memory-gib G]
    python -m vllm_ascend_kvext replay convert LOG TRACE [--tokenizer DIR]

The first form prints which part of the prompts would be hit with dense caching, with vLLM's
retention interval, with adaptive retention, with host memory of several sizes, with a shared tier
behind it, and with an endless cache. TRACE is a log in Mooncake's format, which docs/replay.md
describes. The second form makes such a log of vLLM's request log, or of JSON lines as OpenAI's
clients send them. The log has no text.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext import __version__
from vllm_ascend_kvext.errors import KvextError, ReplayError
from vllm_ascend_kvext.replay.trace import TraceSummary, read_trace, summarize

if TYPE_CHECKING:
    from vllm_ascend_kvext.replay.geometry.model_config import PlannedModel
    from vllm_ascend_kvext.replay.variants import VariantResult

_CONVERT = "convert"
_GIB = 1 << 30
_DEFAULT_INTERVALS_TOKENS = (0, 4096)
_SHARES_OF_ONE_SIZE = (0.25, 1, 4)
"""The sizes of host memory, where one is given, or where the size of the pool stands for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="TRACE", help="the log, or: convert LOG TRACE")
    play = parser.add_argument_group("playing a log")
    play.add_argument("--model-config", type=Path, metavar="DIR", help="folder with a config.json")
    play.add_argument("--groups", type=Path, metavar="FILE", help="instead: a file of its groups")
    play.add_argument("--blocks", type=int, metavar="N", help="num_gpu_blocks of the engine")
    play.add_argument(
        "--host-memory-gib",
        type=float,
        action="append",
        metavar="G",
        help="of all workers; may be repeated. One size: also a quarter and four times of it. "
        "Left out: by the size of the pool",
    )
    play.add_argument(
        "--interval",
        type=int,
        action="append",
        metavar="N",
        help="vLLM's retention interval in tokens; may be repeated. Left out: 0 and 4096",
    )
    play.add_argument(
        "--connector-options",
        default="{}",
        metavar="JSON",
        help="further keys of kv_connector_extra_config",
    )
    play.add_argument("--serve", default="", metavar="ARGS", help="arguments of vllm serve, quoted")
    play.add_argument("--requests", type=int, metavar="N", help="the first N requests only")
    play.add_argument(
        "--slow-down", type=float, default=1.0, metavar="F", help="factor on times of arrival"
    )
    play.add_argument(
        "--decode-ms", type=float, default=30.0, metavar="MS", help="time of a step that decodes"
    )
    play.add_argument(
        "--prefill-tokens-per-s",
        type=float,
        default=20_000.0,
        metavar="N",
        help="prompt tokens that the engine computes in a second",
    )
    play.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    play.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the table")
    play.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    convert = parser.add_argument_group("converting a log")
    convert.add_argument("--tokenizer", metavar="DIR", help="folder or name, for logs with texts")
    convert.add_argument("--block-tokens", type=int, default=16, metavar="N", help="tokens per id")


def run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.paths[0] == _CONVERT:
            return _convert(arguments)
        return _play(arguments)
    except KvextError as error:
        print(error, file=sys.stderr)
        return 1


def _convert(arguments: argparse.Namespace) -> int:
    if len(arguments.paths) != 3:
        raise ReplayError(
            f"replay convert: expected LOG and TRACE, found {len(arguments.paths) - 1} paths. Name "
            "the log to read and the file to write."
        )
    from vllm_ascend_kvext.replay.convert import convert_log

    source, target = map(Path, arguments.paths[1:])
    counts = convert_log(source, target, arguments.tokenizer, arguments.block_tokens)
    print("\n".join(counts.describe(target)))
    return 0


def _play(arguments: argparse.Namespace) -> int:
    _check(arguments)
    path = Path(arguments.paths[0])
    requests = partial(read_trace, path, arguments.requests)
    summary = summarize(requests())
    print("\n".join(_describe_log(path, summary)), flush=True)
    model = _plan(arguments, summary)
    print("\n".join(_describe_model(model)), flush=True)

    from vllm_ascend_kvext.replay.logged_play import Pace
    from vllm_ascend_kvext.replay.plays import play_all
    from vllm_ascend_kvext.replay.progress import ProgressBar
    from vllm_ascend_kvext.replay.report import draw_picture, render_table
    from vllm_ascend_kvext.replay.variants import list_variants, play_variant

    variants = list_variants(
        model.has_sparse_groups,
        model.scheduler_block_tokens,
        arguments.interval or _DEFAULT_INTERVALS_TOKENS,
        _host_sizes(arguments.host_memory_gib, model.pool_bytes),
    )
    pace = Pace(arguments.decode_ms, arguments.prefill_tokens_per_s, arguments.slow_down)

    options = json.loads(arguments.connector_options)

    def play_one(variant: Any, on_progress: Any) -> VariantResult:
        return play_variant(variant, model, requests(), pace, options, on_progress)

    bar = ProgressBar(len(variants) * summary.num_requests, "requests", sys.stderr)
    results = {}
    for result in play_all(variants, play_one, arguments.jobs, bar.show):
        results[result.name] = result
    bar.clear()
    ordered = [results[variant.name] for variant in variants]
    print("\n".join(["", *render_table(ordered)]))
    if arguments.picture is not None:
        title = f"{path.name}, {arguments.blocks:,} blocks: prompt tokens that are hit"
        arguments.picture.write_text(draw_picture(ordered, title), encoding="utf-8")
        print(f"\npicture: {arguments.picture}")
    if arguments.json is not None:
        report = _as_json(arguments, summary, model, ordered)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"all numbers: {arguments.json}")
    return 1 if all(result.refusal for result in ordered) else 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse wrong arguments before anything takes time."""
    if len(arguments.paths) > 1:
        raise ReplayError(
            f"replay: expected one TRACE, found {len(arguments.paths)}. Give the arguments of vllm "
            "serve as one text: --serve '--block-size 128'."
        )
    if (arguments.model_config is None) == (arguments.groups is None):
        found = "neither" if arguments.groups is None else "both"
        raise ReplayError(
            f"replay: expected --model-config or --groups, found {found}. Name the folder of the "
            "model's config.json."
        )
    if arguments.blocks is None:
        raise ReplayError(
            "replay: expected --blocks, found none. The metric vllm:cache_config_info has it as "
            "num_gpu_blocks; the engine's log says it, too."
        )
    _check_options(arguments.connector_options)
    for name in ("blocks", "requests", "slow_down", "decode_ms", "prefill_tokens_per_s", "jobs"):
        _check_positive(name, getattr(arguments, name))
    for gib in arguments.host_memory_gib or ():
        _check_positive("host_memory_gib", gib)
    for interval in arguments.interval or ():
        if interval < 0:
            raise ReplayError(f"--interval: expected 0 or more tokens, found {interval}.")


def _check_options(text: str) -> None:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    own = {"host_memory_gib", "shared_tier"}
    if not isinstance(options, dict) or own & set(options):
        raise ReplayError(
            f"--connector-options: expected a JSON object without {' and '.join(sorted(own))}, "
            f"found {text[:60]}. Give sizes with --host-memory-gib."
        )


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < 1e15:
        raise ReplayError(
            f"--{name.replace('_', '-')}: expected a number above 0, found {value:g}. See "
            "`replay --help`."
        )


def _plan(arguments: argparse.Namespace, summary: TraceSummary) -> PlannedModel:
    """Import vLLM, without this package in it, and plan the model."""
    # vLLM logs to standard output, which is for the tables.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_ascend_kvext.settings import MODE_VARIABLE, Mode

    os.environ[MODE_VARIABLE] = Mode.OFF.value
    serve = shlex.split(arguments.serve)
    if arguments.groups is not None:
        from vllm_ascend_kvext.replay.geometry.described_groups import describe_model

        return describe_model(arguments.groups, serve, arguments.blocks, summary.max_tokens)
    from vllm_ascend_kvext.replay.geometry.model_config import plan_model

    return plan_model(arguments.model_config, serve, arguments.blocks, summary.max_tokens)


def _host_sizes(given_gib: Sequence[float] | None, pool_bytes: int) -> list[float]:
    """The sizes of host memory in GiB, ascending."""
    if given_gib and len(given_gib) > 1:
        return sorted(set(given_gib))
    one = given_gib[0] if given_gib else round(4 * pool_bytes / _GIB, 1) or 1.0
    return [share * one for share in _SHARES_OF_ONE_SIZE]


def _describe_log(path: Path, summary: TraceSummary) -> list[str]:
    minutes = summary.duration_ms / 60_000
    answers = "known" if summary.knows_answers else "not known, so none is hit"
    return [
        f"vllm-ascend-kvext {__version__}",
        f"log: {path}: {summary.num_requests:,} requests in {minutes:,.1f} minutes, "
        f"{summary.prompt_tokens:,} tokens of prompts, {summary.output_tokens:,} of answers "
        f"({answers})",
    ]


def _describe_model(model: PlannedModel) -> list[str]:
    scheduler = model.vllm_config.scheduler_config
    pool_gib = model.pool_bytes / _GIB
    return [
        *model.describe(),
        f"pool: {model.kv_cache_config.num_blocks:,} blocks, {pool_gib:,.1f} GiB on "
        f"{model.num_workers} worker(s); hits in multiples of {model.scheduler_block_tokens} "
        "tokens",
        f"at most {scheduler.max_num_seqs} requests at once, "
        f"{scheduler.max_num_batched_tokens:,} tokens in a step (--serve changes these)",
    ]


def _as_json(
    arguments: argparse.Namespace,
    summary: TraceSummary,
    model: PlannedModel,
    results: Sequence[VariantResult],
) -> dict[str, Any]:
    """What a bug report attaches."""
    return {
        "version": __version__,
        "arguments": {name: _plain(value) for name, value in vars(arguments).items()},
        "log": asdict(summary),
        "groups": model.describe(),
        "results": [result.as_fields() for result in results],
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
