# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs scripts, each in a process of its own that has imported vLLM already.

`run` starts this file as a program. The program reads a JSON object from its standard input:
scripts by name. It writes another: what each script has printed. An import of vLLM takes ten
seconds, so the program imports it once, and forks for each script.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping

PRELOADED = ("vllm.v1.core.sched.async_scheduler", "vllm.config", "torch")


def run(scripts: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """What scripts print, by name. They run one after the other.

    Args:
        scripts: Python programs, by name.
        environ: The variables of their processes.
    """
    ended = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(dict(scripts)),
        env=dict(environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ended.returncode, ended.stderr
    outputs: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return outputs


def output_of(script: str) -> str:
    """What a script prints. If it raises, what it logs and its traceback follow."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as logged:
        process_id = os.fork()
        if not process_id:
            status = 1
            try:
                os.dup2(printed.fileno(), 1)
                os.dup2(logged.fileno(), 2)
                # Modules that the script names as `__main__` are those of a script.
                main = sys.modules["__main__"] = types.ModuleType("__main__")
                exec(compile(script, "script", "exec"), main.__dict__)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(process_id, 0)
        printed.seek(0)
        logged.seek(0)
        return printed.read() + (logged.read() if status else "")


def main() -> None:
    del sys.path[0]  # The folder of this file. Its modules have names of other packages.
    scripts = json.load(sys.stdin)
    for name in PRELOADED:
        importlib.import_module(name)
    print(json.dumps({name: output_of(script) for name, script in scripts.items()}))


if __name__ == "__main__":
    main()
