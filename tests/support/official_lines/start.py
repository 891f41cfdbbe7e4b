# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Start command lines one after the other, each in a process of its own, and report what they do.

    python start.py CASES REPORT

``CASES`` is a JSON file: by name the variables and the arguments of a line. ``REPORT`` gets a line
of JSON for each as soon as it has ended. A process is forked for each line when vLLM and the
plugins are imported, so a line costs no import, and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

READ_BY_PLUGINS = ("VLLM_ASCEND_KVEXT_", "VLLM_PREFIX_CACHE_", "VLLM_USE_V2_MODEL_RUNNER")
MAX_S = 240
MAX_GROUP = 30
"""The lines that share a process with plugins. A line waits for at most so many in each arm."""
SCALE = 0.2
SEED = 53
PROMPT_TOKENS = 700
REPLY_TOKENS = 8
ON_DEVICE, IN_HOST_MEMORY, ZEROED = "on the device", "in host memory", "host memory zeroed"
LABELS = ("new", ON_DEVICE, IN_HOST_MEMORY, ZEROED)
"""The labels of the answers of the stage ``engine``."""


def main() -> None:
    cases, report = map(Path, sys.argv[1:])
    import_what_all_need()
    report.touch()
    for group in groups_of(json.loads(cases.read_text())):
        before = report.read_text()
        ended = in_fork(lambda group=group: start_group(group, report), report)
        reported = report.read_text()[len(before) :]
        with report.open("a") as lines:
            for name in group:
                if f'{{"name": {json.dumps(name)},' not in reported:
                    lines.write(json.dumps({"name": name, **ended}) + "\n")


def groups_of(cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Cases whose plugins read the same variables, which follow each other, so many together."""
    groups: list[dict[str, Any]] = []
    read_before: dict[str, str] = {}
    for name, case in cases.items():
        read = read_by_plugins(case["environ"])
        if not groups or read != read_before or len(groups[-1]) == MAX_GROUP:
            groups.append({})
        groups[-1][name] = case
        read_before = read
    return groups


def read_by_plugins(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read when plugins are loaded. Others are read when they are needed."""
    return {name: value for name, value in environ.items() if name.startswith(READ_BY_PLUGINS)}


def start_group(group: dict[str, Any], report: Path) -> dict[str, Any]:
    """Start lines. They share the import of the plugins."""
    from vllm.plugins import load_general_plugins

    os.environ |= read_by_plugins(next(iter(group.values()))["environ"])
    load_general_plugins()
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        # The emulation does this when it is imported with the variable. See its stand-ins.
        import_module("vllm.config.vllm").HAS_TRITON = True
    inspect_in_forks()
    parser = new_parser()
    for name, case in group.items():
        found = in_fork(lambda case=case: started(case, parser), report, MAX_S)
        with report.open("a") as lines:
            lines.write(json.dumps({"name": name, **found}) + "\n")
    return {"stage": "", "error": "the group ended early"}


def import_what_all_need() -> None:
    """Import what costs seconds. No variable of a line is read meanwhile."""
    import torch  # noqa: F401
    import transformers  # noqa: F401
    import vllm.engine.arg_utils  # noqa: F401

    command_parser()


def command_parser() -> Any:
    """The module that reads the arguments of ``vllm serve``. vLLM 0.30 has moved it."""
    try:
        return import_module("vllm.entrypoints.launchers.cli_args")
    except ModuleNotFoundError:
        return import_module("vllm.entrypoints.openai.cli_args")


def in_fork(function: Callable[[], dict[str, Any]], report: Path, max_s: int = 0) -> dict[str, Any]:
    """The result of a function in a forked process."""
    answer = report.with_suffix(f".{os.getpid()}")
    answer.unlink(missing_ok=True)
    log = Path(f"{answer}.log")

    def write_answer() -> None:
        signal.alarm(max_s)
        with log.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        answer.write_text(json.dumps(function()))

    fork_and_wait(write_answer)
    if not answer.exists():
        return {"stage": "", "error": "no answer: " + log.read_text(errors="replace")[-2000:]}
    found: dict[str, Any] = json.loads(answer.read_text())
    answer.unlink()
    log.unlink()
    return found


def fork_and_wait(function: Callable[[], object]) -> None:
    """Run a function in a forked process, which prints what the function raises."""
    process = os.fork()
    if process == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(process, 0)


def started(case: dict[str, Any], parser: Any) -> dict[str, Any]:
    began_s = time.monotonic()
    found: dict[str, Any] = {"stage": ""}
    os.environ |= case["environ"]
    try:
        config = configure(parser, case["arguments"])
        found["stage"] = "configuration"
        if case["stage"] == "engine":
            found["answers"] = answers_of(config)
            found["stage"] = "engine"
    except BaseException as error:
        cause = cause_of(error)
        found["error"] = said(cause)
        found["raised_by"] = raised_by(cause)
        found["trace"] = traceback.format_exc()[-3000:]
    found["seconds"] = round(time.monotonic() - began_s, 1)
    return found


def inspect_in_forks() -> None:
    """Let vLLM inspect the classes of models in forks. By default it starts a new interpreter."""
    from vllm.model_executor.models import registry

    def run(function: Callable[[], Any]) -> Any:
        result = Path(f"{tempfile.mkdtemp()}/result")
        fork_and_wait(lambda: result.write_bytes(pickle.dumps(function())))
        return pickle.loads(result.read_bytes())

    registry._run_in_subprocess = run


def new_parser() -> Any:
    """The parser of ``vllm serve``, and what its results need to be imported."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = command_parser().make_arg_parser(FlexibleArgumentParser())
    parser.error = refuse  # argparse's function prints the message and exits.
    get_quantization_config("ascend")
    return parser


def configure(parser: Any, arguments: list[str]) -> Any:
    """Make the configuration of an engine as the command does, and the platform's checks."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    parsed = parser.parse_args(arguments)
    command_parser().validate_parsed_serve_args(parsed)
    parsed.model = parsed.model_tag
    return AsyncEngineArgs.from_cli_args(parsed).create_engine_config()


def refuse(message: str) -> NoReturn:
    """Raise what a parser of arguments complains about."""
    raise ValueError(message)


def answers_of(config: Any) -> dict[str, dict[str, Any]]:
    """Serve a prompt again and again. Returns the answers by label.

    It is new, then cached on the device, and then in host memory alone, where KvextConnector is.
    The last time, host memory is zeroed, so that an answer that reads it has to be wrong.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_vllm_config(config)
    core = engine.engine_core.engine_core
    scheduler = core.scheduler
    worker = core.model_executor.driver_worker
    draw_weights(getattr(worker, "worker", worker).model_runner.model)
    prompt = random.Random(0).choices(range(512), k=PROMPT_TOKENS)
    answers = {}
    for label in LABELS:
        if label in (IN_HOST_MEMORY, ZEROED):
            engine.reset_prefix_cache()
            spoil(label == ZEROED)
        answers[label] = answer(engine, scheduler, prompt, label)
    return answers


def spoil(is_host_too: bool) -> None:
    """Fill the pages that KvextConnector reads and writes with wrong bytes."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from vllm_ascend_kvext.patches.connector.scheduler import kvext_connector_in

    if not has_kv_transfer_group():
        return
    side = kvext_connector_in(get_kv_transfer_group()).worker_side
    for tensor in side._runner.pools.tensors:
        tensor.fill_(0x44)
    if is_host_too:
        side._host.tensor.zero_()


def draw_weights(model: Any) -> None:
    """Give a model random weights of a scale with which pages decide what it answers.

    vLLM's own dummy weights are so small that all log-probabilities are nearly the same.
    """
    import torch

    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.is_floating_point():
                drawn = torch.randn(weight.shape) * SCALE
                weight.copy_((1 + drawn / 4 if "norm" in name else drawn).to(weight.dtype))


def answer(engine: Any, scheduler: Any, prompt: list[int], request_id: str) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=REPLY_TOKENS, ignore_eos=True, detokenize=False, logprobs=5
    )
    engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
    outputs: list[Any] = []
    while engine.has_unfinished_requests() or has_transfers(scheduler):
        outputs += engine.step()
    (reply,) = outputs[-1].outputs
    return {
        "hit_tokens": outputs[-1].num_cached_tokens or 0,
        "reply": list(reply.token_ids),
        "logprobs": [
            {str(token): entry.logprob for token, entry in step.items()} for step in reply.logprobs
        ],
    }


def has_transfers(scheduler: Any) -> bool:
    """Whether KvextConnector stores or loads."""
    if scheduler.connector is None:
        return False
    from vllm_ascend_kvext.patches.connector.scheduler import kvext_connector_in

    connector = kvext_connector_in(scheduler.connector)
    return connector is not None and connector.scheduler_side.has_transfers


def cause_of(error: BaseException) -> BaseException:
    """The error that a check of a configuration raised. pydantic raises another one."""
    if hasattr(error, "errors"):
        for each in error.errors():
            cause = each.get("ctx", {}).get("error")
            if isinstance(cause, BaseException):
                return cause
    return error


def said(error: BaseException) -> str:
    """What an error says. An assertion without words is named by its line."""
    text = str(error)
    if not text:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{Path(frame.filename).name}: {frame.line}"
    return f"{type(error).__name__}: {text}"[:1000]


def raised_by(error: BaseException) -> str:
    """The package whose function raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    packages = ("vllm_ascend_kvext", "vllm_ascend", "vllm", "transformers")
    return next(
        (
            package
            for frame in reversed(frames)
            for package in packages
            if f"/{package}/" in frame.filename
        ),
        "",
    )


if __name__ == "__main__":
    # The package `support` is imported by its name, and none of its modules by theirs.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    sys.path.append(str(Path(__file__).parents[2]))
    main()
