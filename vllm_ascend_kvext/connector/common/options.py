# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Every key of ``kv_connector_extra_config``: its default, its values and what they do.

The fields of `ConnectorOptions` are the only declaration, see ``declared``. Parsing, error messages
and the page of settings follow from them. A chunk is a multiple of the layout's unit. The unit is
known only when the caches are registered, see `ConnectorOptions.chunk_tokens_of`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from vllm_ascend_kvext.connector.common.option_values import (
    CONFIG,
    FLAG,
    POSITIVE_INTEGER,
    Values,
    are_natural,
    choice,
    is_number,
    parse_values,
    wrong_value,
)
from vllm_ascend_kvext.declared import declared
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.store.arena import ALIGNMENT_BYTES
from vllm_ascend_kvext.store.prefix import cut_tokens_of
from vllm_ascend_kvext.store.store_policy import StorePolicy

_GIB = 1 << 30
_DEFAULT_CHUNK_TOKENS = 1024
_MAX_GIB = 1 << 30
# At most five digits, so that a typing error such as 0-999999999 does not fill the memory.
_CPU_RANGE = re.compile("([0-9]{1,5})(?:-([0-9]{1,5}))?")


def _cpu_numbers(value: Any) -> tuple[int, ...]:
    """The CPUs of a list or a text, ascending; empty if the value is neither."""
    if not isinstance(value, str):
        return tuple(sorted(set(value))) if are_natural(value) else ()
    cpus: set[int] = set()
    for part in value.split(","):
        found = _CPU_RANGE.fullmatch(part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            return ()
        cpus.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(cpus))


_GIB_OF_MEMORY = Values(
    f"a number above 0, up to {_MAX_GIB}, without quotes",
    lambda value: is_number(value) and 0 < value <= _MAX_GIB,
    float,
)
_TIER_URL = Values(
    "file:///path of a folder, or mooncake://host:port of a master",
    lambda value: re.match("file:///|mooncake://[^/]+:[0-9]{1,5}$", str(value)) is not None,
    str,
)
_CPUS = Values(
    'numbers of CPUs, as a list such as [2, 3] or as a text such as "0-3,8"',
    lambda value: bool(_cpu_numbers(value)),
    _cpu_numbers,
)


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The options of one connector; all but the first two are keys of the configuration."""

    world_size: int = 1
    """The number of the engine's workers, which share the host memory."""

    has_chosen_chunk: bool = False
    """Whether ``chunk_tokens`` is the user's choice."""

    host_memory_gib: Annotated[float, _GIB_OF_MEMORY] = 8
    """Host memory of all workers of an engine together, in GiB. Each worker pins an equal part of
    it when the engine starts. Where the machine or the container has too little, the engine does
    not start: see `docs/offload.md`."""

    chunk_tokens: Annotated[int, POSITIVE_INTEGER] = _DEFAULT_CHUNK_TOKENS
    """The tokens of a chunk, in which rows of full-attention groups are stored. The number must be
    a multiple of the model's row unit (128 for DeepSeek-V4). It may not exceed the larger of the
    longest request and the default. The engine refuses other numbers when it starts, and names
    valid ones. The default is rounded up to a multiple. With any chunk, prompts and answers are
    stored, and hit, up to the last row unit."""

    store_policy: Annotated[StorePolicy, choice(StorePolicy)] = StorePolicy.SECOND_TOUCH
    """`second_touch`: the connector stores what a request needs to resume at the end of a prompt,
    at the end of an answer, or at another boundary where requests may resume. It also stores what a
    second request computes. `all`: it stores everything that is computed. `never`: it stores
    nothing."""

    state_policy: Annotated[StatePolicy, choice(StatePolicy)] = StatePolicy.EXACT
    """`exact`: states (Mamba, compressors) are stored and loaded with the rest. `skip`: they are
    left out. This is lossy: tokens behind a loaded boundary are computed from other states, and
    answers change."""

    hole_reuse: Annotated[bool, FLAG] = True
    """`true`: if a chunk is missing, what is stored behind it is still loaded, and only the missing
    tokens are computed. `false`: everything behind the missing chunk is computed."""

    load_if_slower: Annotated[bool, FLAG] = False
    """`true`: loads are made, and preempted requests are stored, even if this is estimated to take
    longer than computing the same tokens. `false`: such loads are left out, logged and counted."""

    copy_cpus: Annotated[tuple[int, ...] | None, _CPUS] = None
    """The CPUs that copies run on: a list such as `[2, 3]`, or a text such as `"0-3,8"`. Unset:
    CPUs of the process that the model does not run on. Threads return to named CPUs when something
    has bound them elsewhere."""

    allow_cuda: Annotated[bool, FLAG] = False
    """Experimental: the connector has never run on a GPU. `true`: pages on NVIDIA GPUs are stored
    and loaded, too. `false`: an engine on a GPU does not start with the connector."""

    shared_tier: Annotated[str | None, _TIER_URL] = None
    """The place of KV that engines share and that outlives them: `file:///path` of a folder, or
    `mooncake://host:port` of the master of a Mooncake Store. See `docs/shared_tier.md`. Unset:
    engines share nothing."""

    shared_tier_bytes: Annotated[int | None, POSITIVE_INTEGER] = None
    """The most bytes that the folder of `shared_tier` may hold, for all engines together. Unset:
    half of the file system. A Mooncake Store has a size of its own, and this option is refused."""

    @property
    def spare_bytes(self) -> int:
        """The bytes behind each entry in host memory, for the entry's seal in a shared tier."""
        return ALIGNMENT_BYTES if (self.shared_tier or "").startswith("mooncake:") else 0

    @property
    def host_memory_bytes_per_worker(self) -> int:
        """The size of each worker's host buffer, a multiple of the alignment."""
        num_bytes = int(self.host_memory_gib * _GIB) // self.world_size
        return num_bytes - num_bytes % ALIGNMENT_BYTES

    def chunk_tokens_of(self, unit_tokens: int, max_model_len: int) -> int:
        """The tokens of a chunk, a multiple of the layout's unit.

        The default is rounded up to a multiple, so it suits any model.

        Args:
            max_model_len: The most tokens of a request. A larger chunk is never whole.

        Raises:
            SettingsError: If the user's number is no multiple, or is too large. The message names
                valid sizes.
        """
        most = max(max_model_len, _DEFAULT_CHUNK_TOKENS)
        most += -most % unit_tokens
        if self.has_chosen_chunk and self.chunk_tokens > most:
            raise wrong_value(
                "chunk_tokens",
                self.chunk_tokens,
                f"at most {most}, by which every request is one chunk (max_model_len is "
                f"{max_model_len})",
            )
        if not self.has_chosen_chunk:
            cut_tokens = cut_tokens_of(unit_tokens)
            multiple = cut_tokens if self.chunk_tokens >= cut_tokens else unit_tokens
            return self.chunk_tokens + -self.chunk_tokens % multiple
        rest = self.chunk_tokens % unit_tokens
        below = self.chunk_tokens - rest
        above = below + unit_tokens if rest else below
        if not rest:
            return above
        raise wrong_value(
            "chunk_tokens",
            self.chunk_tokens,
            f"a multiple of {unit_tokens}, the tokens of this model's row unit",
            f"The nearest: {' or '.join(str(size) for size in (below, above) if size)}.",
        )


OPTIONS = declared(ConnectorOptions)


def parse_options(
    extra_config: Mapping[str, Any] | None,
    world_size: int,
    other_keys: Collection[str] = (),
) -> ConnectorOptions:
    """Read and validate the configuration of a connector.

    A key whose value is null is absent.

    Args:
        extra_config: ``kv_connector_extra_config``; None if there is none.
        world_size: Workers of the engine.
        other_keys: The keys of extensions, see `parse_values`.

    Raises:
        SettingsError: If the configuration is no object, a key is not in `OPTIONS`, or a value is
            wrong.
    """
    if extra_config is None:
        extra_config = {}
    if not isinstance(extra_config, Mapping):
        raise SettingsError(
            f'{CONFIG}: expected an object, such as {{"host_memory_gib": 8}}, found '
            f"{extra_config!r}. Correct it, or leave it out for the defaults."
        )
    values = parse_values(extra_config, OPTIONS, "", other_keys)
    options = ConnectorOptions(world_size, "chunk_tokens" in values, **values)
    if options.shared_tier and options.state_policy is StatePolicy.SKIP:
        raise wrong_value(
            "shared_tier",
            options.shared_tier,
            "state_policy=exact: other engines would take what is approximate for exact",
            "Set state_policy to exact, or leave shared_tier out.",
        )
    if options.shared_tier_bytes and (options.shared_tier or "").startswith("mooncake:"):
        raise wrong_value(
            "shared_tier_bytes",
            options.shared_tier_bytes,
            "a folder as shared_tier: a Mooncake Store is as large as its mooncake_clients make it",
            "Leave it out.",
        )
    if not options.host_memory_bytes_per_worker:
        raise wrong_value(
            "host_memory_gib",
            options.host_memory_gib,
            f"memory for {world_size} workers",
            "Give them more, or leave the connector out.",
        )
    return options
