# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``python -m vllm_ascend_kvext``: commands that show what the package does on this machine."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_ascend_kvext import __version__

_COMMANDS = {
    "status": "activate as vLLM would and show what came of each feature",
    "check-model": "ask a model whether its segments may be reused by blending",
    "replay": "play a log of requests, and show what each kind of caching would hit",
    "collect-env": "what to attach to a bug report",
    "fingerprint": "compare the source of upstream's functions with the stored source fingerprints",
    "ledger": "which ids of patches are free",
}
_PROGRAM = "python -m vllm_ascend_kvext"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status of the process."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join(f"{name:12} {summary}" for name, summary in _COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `command --help`")
    parsed = parser.parse_args(arguments)

    # Only the module of the command is imported. collect-env must work even if others do not
    # import.
    name = parsed.command.replace("-", "_")
    command = importlib.import_module(f"vllm_ascend_kvext.commands.{name}")
    subparser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} {parsed.command}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=command.__doc__,
    )
    command.add_arguments(subparser)
    exit_status: int = command.run(subparser.parse_args(parsed.arguments))
    return exit_status


if __name__ == "__main__":
    sys.exit(main())
