# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Sends vLLM's log to a file while an example runs, so that the example's output can be read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def engine_log(path: Path) -> Iterator[TextIO]:
    """Redirect stdout and stderr of this process and of its children to a file.

    The file descriptors are redirected, because compiled code and other processes write to them,
    too. If the block fails, the path of the file is printed.

    Yields:
        The terminal, for progress bars.
    """
    path = path.resolve()
    path.parent.mkdir(exist_ok=True)
    kept = {number: os.dup(number) for number in (1, 2)}
    with path.open("w") as log, os.fdopen(os.dup(2), "w") as terminal:
        _redirect(dict.fromkeys(kept, log.fileno()))
        try:
            yield terminal
        except BaseException:
            print(f"\nThe log of vLLM: {path}", file=terminal)
            raise
        finally:
            _redirect(kept)
            for number in kept.values():
                os.close(number)


def _redirect(targets: dict[int, int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for number, target in targets.items():
        os.dup2(target, number)
