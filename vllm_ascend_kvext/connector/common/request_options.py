# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What a request asks of the connector, in ``SamplingParams.extra_args``.

Over HTTP that is ``"vllm_xargs": {"kvext_store": "false"}``.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from vllm_ascend_kvext.request_arguments import is_first_answer, read_argument, shown, truth_of
from vllm_ascend_kvext.upstream_types import Request

STORE_ARGUMENT = "kvext_store"
"""``false`` keeps KV of the request out of host memory and of a shared tier."""

EXPLAIN_ARGUMENT = "kvext_explain"
"""``true`` makes the response say what was reused, and why not more."""

logger = logging.getLogger("vllm.ascend_kvext.connector")


class RequestOptions(NamedTuple):
    """What one request asks for.

    Attributes:
        may_store: Whether its KV may be stored.
        explains: Whether its response says what was reused.
    """

    may_store: bool = True
    explains: bool = False


DEFAULT_OPTIONS = RequestOptions()


def read_options(request: Request) -> RequestOptions:
    """Read what a request asks for.

    A wrong value is logged, and never fails the request. KV of a request is not stored if its value
    of ``kvext_store`` is wrong, because the client wanted something other than the default.
    """
    extra_args = getattr(request.sampling_params, "extra_args", None)
    if not extra_args:
        return DEFAULT_OPTIONS
    may_store = _read(request, STORE_ARGUMENT, "Its KV is not stored: correct it.")
    explains = _read(request, EXPLAIN_ARGUMENT, "Nothing is explained: correct it.")
    if may_store is None:
        may_store = STORE_ARGUMENT not in extra_args or extra_args[STORE_ARGUMENT] is None
    return RequestOptions(may_store, bool(explains))


def _read(request: Request, argument: str, consequence: str) -> bool | None:
    """The truth of an argument; None if it is absent, or neither true nor false."""
    value = read_argument(request.sampling_params.extra_args, argument)
    if value is None:
        return None
    truth = truth_of(value)
    if truth is None and is_first_answer(argument, request.request_id):
        logger.warning(
            "Request %s: %s: expected true or false, found %s. %s",
            request.request_id,
            argument,
            shown(value),
            consequence,
        )
    return truth
