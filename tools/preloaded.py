# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Starts Python programs by forking a process that has imported what vLLM imports.

    python -I tools/preloaded.py SOCKET MODULE...

One core takes ten seconds to import vLLM, two thirds of them for other packages. A run of all tests
imports it some hundred times. The server imports neither vLLM nor the tested package, because both
read the environment. By default torch has one thread, so this process may fork.

A client asks for a program over the socket, see `run`. Client and server have the same files.
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
"""The variable with the path of the socket, for the processes that a program starts."""

IMPORTED = (
    "torch._dynamo.aot_compile",
    "torch._inductor.lowering",
    "transformers.image_processing_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.image_processing_auto",
    "transformers.processing_utils",
    "fastapi.openapi.models",
    "openai.types.responses",
    "opentelemetry.sdk.metrics",
    "xgrammar.structural_tag",
    "mistral_common.tokens.tokenizers.mistral",
    "gguf",
)
ENVIRON = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""Variables that torch reads when it is imported. They apply to all programs."""

ISOLATED = ("-I",)
HASHED_ALIKE = ("-s", "-P")
"""The flags of an interpreter that obeys ``PYTHONHASHSEED``, which is 0 for the server. A script
also finds the modules of its folder."""

_MAX_START_S = 300.0
_PR_SET_PDEATHSIG = 1
"""An option of Linux's `prctl(2)`. Forked processes do not inherit it."""


class Program(NamedTuple):
    """A program to start.

    Attributes:
        arguments: A script, or ``-m`` and the name of a module, and then its arguments.
        environ: Its environment variables.
        folder: Its working directory.
        output: The file that gets the program's stdout and stderr.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    output: str


def run(socket: str, program: Program, timeout_s: float) -> int:
    """Run a program to its end.

    Returns:
        Its exit code; negative for a signal.

    Raises:
        TimeoutError: The program and all processes that it has started have been killed, or the
            server does not answer.
        EOFError: The server has been killed.
    """
    with _connect(socket) as connection:
        connection.send(tuple(program))
        if not connection.poll(timeout_s):
            raise TimeoutError(f"killed after {timeout_s:.0f} s: {program.arguments}")
        return int(connection.recv())


def run_either_way(
    program: Program, timeout_s: float, interpreter: Sequence[str], socket: str | None
) -> int:
    """Run a program with `run`, or without a socket in a new interpreter.

    Args:
        interpreter: The path and the flags of the interpreter.

    Raises:
        TimeoutError: See `run`.
        subprocess.TimeoutExpired: The program in the new interpreter has been killed.
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
    """Connect to the server. The server first imports packages, so wait until it listens."""
    deadline_s = time.monotonic() + _MAX_START_S
    while True:
        try:
            return Client(socket, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nobody listens at {socket}: see {__file__}'s log") from None
        time.sleep(0.1)


@contextmanager
def served(
    python: Path, log: Path, imported: Sequence[str] = IMPORTED, flags: Sequence[str] = ISOLATED
) -> Iterator[str]:
    """Start a server, and yield its socket. The server ends with the block.

    Args:
        flags: The flags of the interpreter, `ISOLATED` or `HASHED_ALIKE`. They apply to all
            programs.
    """
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        socket = str(Path(folder) / "socket")
        environ = {name: text for name, text in os.environ.items() if name[:6] != "PYTHON"}
        server = subprocess.Popen(
            [str(python), *flags, __file__, socket, *imported],
            env={**environ, **ENVIRON, "PYTHONHASHSEED": "0"},
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
    # The server ends when the process that started it ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in imported:
        # Another release of a package may lack the module. A program that needs the module will
        # report this.
        with suppress(Exception):
            import_module(name)
    gc.collect()
    # An engine collects garbage five times when it starts or stops, which would take 0.2 s each.
    gc.freeze()
    # The server does not wait for the processes between it and the programs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
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
        # An interrupt of all processes ends the client, and so the connection, and so the program.
        for interrupt in (signal.SIGINT, signal.SIGTERM):
            signal.signal(interrupt, signal.SIG_IGN)
        if connection in wait([connection, os.pidfd_open(process_id)]):
            os.killpg(process_id, signal.SIGKILL)  # The client has closed the connection.
        else:
            connection.send(os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]))
        os._exit(0)


def _become(program: Program) -> None:
    """Run a program as a new interpreter with the server's flags does."""
    os.setsid()
    os.environ.clear()
    os.environ.update(program.environ)
    os.chdir(program.folder)
    output = os.open(program.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    if "torch" in sys.modules:
        # The backend of a device reads the environment, and it is the server's so far.
        sys.modules["torch"]._import_device_backends()
    if program.arguments[0] == "-m":
        sys.argv = [*program.arguments[1:]]
        runpy.run_module(program.arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*program.arguments]
        if not sys.flags.isolated:
            sys.path.insert(0, str(Path(program.arguments[0]).parent))
        runpy.run_path(program.arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
