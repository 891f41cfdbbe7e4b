# SPDX-License-Identifier: Apache-2.0
"""Starts Python programs by forking a process that has imported what vLLM imports.

    python -I tools/preloaded.py SOCKET MODULE...

It takes a core ten seconds to import vLLM, two thirds of them for other packages, and a run of all
tests does it some hundred times. Neither vLLM nor what is tested is imported here: they read the
environment. Unless torch is told otherwise, it has one thread, and this process may fork.

A program is asked for over the socket, see `run`; what asks has the same files.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import NamedTuple

VARIABLE = "KVEXT_PRELOADED"
"""Names the socket, to whatever a program starts."""

IMPORTED = (
    "torch._dynamo.aot_compile",
    "torch._inductor.lowering",
    "transformers.image_processing_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.image_processing_auto",
    "transformers.processing_utils",
    "openai.types.responses",
    "mistral_common.tokens.tokenizers.mistral",
    "gguf",
)
ENVIRON = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""Read when torch is imported: so of all programs."""

_MAX_START_S = 300.0
_PR_SET_PDEATHSIG = 1
"""Of Linux: `prctl(2)`. It does not hold for what is forked."""


class Program(NamedTuple):
    """What is started: a script and its arguments, or ``-m`` and a module's name before them."""

    arguments: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    output: str


def run(socket: str, program: Program, timeout_s: float) -> int:
    """Run a program to its end; the file ``output`` gets what it writes.

    Returns:
        Its exit code, negative for a signal.

    Raises:
        TimeoutError: It has been killed, and all that it has started; or nobody answers.
        EOFError: What runs it has been killed.
    """
    with _connect(socket) as connection:
        connection.send(tuple(program))
        if not connection.poll(timeout_s):
            raise TimeoutError(f"killed after {timeout_s:.0f} s: {program.arguments}")
        return int(connection.recv())


def run_either_way(
    program: Program, timeout_s: float, interpreter: Sequence[str], socket: str | None
) -> int:
    """As `run`; without a socket, in an interpreter of its own, which is a path and flags.

    Raises:
        TimeoutError: See `run`.
        subprocess.TimeoutExpired: It has been killed.
    """
    if socket is not None:
        return run(socket, program, timeout_s)
    with open(program.output, "w") as output:
        return subprocess.run(
            [*interpreter, *program.arguments],
            env=dict(program.environ),
            cwd=program.folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        ).returncode


def _connect(socket: str) -> Connection:
    """Wait until somebody listens: importing takes a while."""
    deadline_s = time.monotonic() + _MAX_START_S
    while True:
        try:
            return Client(socket, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nobody listens at {socket}: see {__file__}'s log") from None
        time.sleep(0.1)


@contextmanager
def served(python: Path, log: Path, imported: Sequence[str] = IMPORTED) -> Iterator[str]:
    """The socket of a process of this file's, which starts, and ends with the block."""
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        socket = str(Path(folder) / "socket")
        server = subprocess.Popen(
            [str(python), "-I", __file__, socket, *imported],
            env={**os.environ, **ENVIRON},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield socket
        finally:
            server.kill()
            server.wait()


def main() -> None:
    address, *imported = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with whoever has started it
    for name in imported:
        with suppress(Exception):  # of another release of it; whoever needs it will see
            import_module(name)
    gc.collect()
    gc.freeze()  # an engine that starts or stops looks for garbage five times, .2 s each
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes in between
    listener = Listener(address, "AF_UNIX")
    while True:
        connection = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        program = Program(*connection.recv())
        process_id = os.fork()
        if process_id == 0:
            connection.close()
            _become(program)
            return
        if connection in wait([connection, os.pidfd_open(process_id)]):
            os.killpg(process_id, signal.SIGKILL)  # whoever has asked is gone
        else:
            connection.send(os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]))
        os._exit(0)


def _become(program: Program) -> None:
    """Run a program as ``python -I`` does."""
    os.setsid()
    os.environ.clear()
    os.environ.update(program.environ)
    os.chdir(program.folder)
    output = os.open(program.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    if program.arguments[0] == "-m":
        sys.argv = [*program.arguments[1:]]
        runpy.run_module(program.arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*program.arguments]
        runpy.run_path(program.arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
