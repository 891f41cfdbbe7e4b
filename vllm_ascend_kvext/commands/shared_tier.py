# SPDX-License-Identifier: Apache-2.0
"""What ``status --shared-tier`` says of a tier: whether it works, what it has, how full it is."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator

from vllm_ascend_kvext.errors import KvextError
from vllm_ascend_kvext.shared_tier.files import FilesTier, files_below
from vllm_ascend_kvext.shared_tier.names import differences, engines_below
from vllm_ascend_kvext.shared_tier.protocol import FORMAT_VERSION, Answer, SharedObject

_CHECK = "status-check"
_NO_LIMIT_BYTES = 1 << 62
"""Of a tier that removes nothing: whose capacity this is, only its engines know."""


def describe(url: str) -> tuple[bool, list[str]]:
    """Whether the tier works, and lines for a person. Puts and gets one object; makes no folder."""
    try:
        tier = FilesTier(url, _NO_LIMIT_BYTES, rank=0, makes_folder=False)
    except KvextError as error:
        return False, [str(error)]
    what = SharedObject(0, f"{_CHECK}/T0-{os.getpid()}-0{'0' * 31}", 0, 4096)
    tier.register(memoryview(bytearray(os.urandom(4096))))
    began_s = time.perf_counter()
    is_well = [*tier.put([what]), *tier.get_into([what], lambda _: None)] == [Answer.WHOLE] * 2
    tier.forget([what.name])
    milliseconds = (time.perf_counter() - began_s) * 1000
    state = f"works (an object there and back: {milliseconds:.1f} ms)" if is_well else "FAILS"
    return is_well, [f"shared tier {url}, format {FORMAT_VERSION}: {state}", *_contents(tier)]


def _contents(tier: FilesTier) -> Iterator[str]:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for _, taken_bytes, path in files_below(tier.root):
        namespace = os.path.relpath(path, tier.root).partition(os.sep)[0]
        sizes[namespace] += taken_bytes
        counts[namespace] += 1
    space = os.statvfs(tier.root)
    free_gb = space.f_bavail * space.f_frsize / 1e9
    yield f"holds {sizes.total() / 1e9:.3f} GB; the file system has {free_gb:.3f} GB left"
    engines = engines_below(tier.root)
    names = sorted(engines, key=lambda each: -sizes[each])
    for name in names:
        yield f"  name space {name}: {counts[name]} objects, {sizes[name] / 1e9:.3f} GB"
    for other in names[1:]:
        apart = "; ".join(differences(engines[names[0]], engines[other]))
        yield f"  {names[0]} ('here') and {other} ('there') do not meet: {apart}"
