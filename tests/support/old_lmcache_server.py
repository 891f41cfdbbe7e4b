# SPDX-License-Identifier: Apache-2.0
"""A server that speaks the protocol of an older LMCache, and keeps nothing.

    python old_lmcache_server.py PORT RELEASE LOG

What differs from release to release is how requests are numbered (the order of ``RequestType`` in
``lmcache/v1/multiprocess/protocols/base.py``) and what a store takes. Frames are those of all of
them: the request's own number, its kind, arguments; an answer repeats the first two. Requests that
the release does not have, or with other arguments than its own, get no answer. Every request is a
line of the log: the name of its kind, and whether it was answered.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 256

_CHUNK_SIZE: tuple[str, list[Any], Any] = ("get_chunk_size", [], CHUNK_TOKENS)
_NOOP: tuple[str, list[Any], Any] = ("noop", [], "OK")
_UNREGISTER: tuple[str, list[Any], Any] = ("unregister_kv_cache", [int], None)


def _store(block_ids: Any) -> tuple[str, list[Any], Any]:
    """Its key, the worker, the blocks, and an event; the answer is an event and whether it went."""
    return ("store", [dict[str, Any], int, block_ids, bytes], (b"", True))


FLAT, NESTED = list[int], list[list[int]]

_PING: tuple[str, list[Any], Any] = ("ping", [int | None], True)
_OF_0_5_6: dict[int, tuple[str, list[Any], Any]] = {
    2: _UNREGISTER,
    6: _store(NESTED),
    20: ("clear", [bool], None),
    21: _CHUNK_SIZE,
    22: _PING,
    24: _NOOP,
}

RELEASES: dict[str, dict[int, tuple[str, list[Any], Any]]] = {
    "0.4.5": {
        2: _UNREGISTER,
        3: _store(FLAT),
        10: ("clear", [], None),
        11: _CHUNK_SIZE,
        12: ("ping", [], True),
        14: _NOOP,
    },
    "0.4.6": {
        2: _UNREGISTER,
        3: _store(FLAT),
        15: ("clear", [], None),
        16: _CHUNK_SIZE,
        17: ("ping", [], True),
        19: _NOOP,
    },
    "0.4.7": {
        2: _UNREGISTER,
        3: _store(NESTED),
        16: ("clear", [], None),
        17: _CHUNK_SIZE,
        18: ("ping", [], True),
        20: _NOOP,
    },
    "0.5.0": {
        2: _UNREGISTER,
        3: _store(NESTED),
        17: ("clear", [], None),
        18: _CHUNK_SIZE,
        19: _PING,
        21: _NOOP,
    },
    "0.5.4": {
        2: _UNREGISTER,
        6: _store(NESTED),
        20: ("clear", [], None),
        21: _CHUNK_SIZE,
        22: _PING,
        24: _NOOP,
        40: ("get_experimental", [], []),
    },
    "0.5.5": {
        2: _UNREGISTER,
        6: _store(NESTED),
        11: ("query_prefetch_lookup_hits", [str], 0),
        20: ("clear", [], None),
        21: _CHUNK_SIZE,
        22: _PING,
        24: _NOOP,
        32: ("get_experimental", [], []),
    },
    "0.5.6": {**_OF_0_5_6, 32: ("get_experimental", [], ["kv_event_stream"])},
    "0.5.6 without KV events": {**_OF_0_5_6, 32: ("get_experimental", [], [])},
    "silent": {},
}
"""By release: number of a request, its name, what it takes, what is answered."""


def answer(release: str, number: int, arguments: list[bytes]) -> tuple[str, bool, Any]:
    """The name of a request, whether it is answered, and with what."""
    import msgspec

    known = RELEASES[release].get(number)
    if known is None:
        return f"request {number}", False, None
    name, kinds, value = known
    if len(kinds) != len(arguments):
        return name, False, None
    try:
        for kind, argument in zip(kinds, arguments, strict=True):
            msgspec.msgpack.decode(argument, type=kind)
    except msgspec.ValidationError:
        return name, False, None
    return name, True, value


def serve(port: int, release: str, log: Path) -> None:
    """Until the process ends."""
    import msgspec
    import zmq

    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(f"tcp://127.0.0.1:{port}")
    with log.open("w") as lines:
        while True:
            client, uid, kind, *arguments = socket.recv_multipart()
            name, is_answered, value = answer(release, msgspec.msgpack.decode(kind), arguments)
            print(name, "answered" if is_answered else "not answered", file=lines, flush=True)
            if is_answered:
                values = [] if value is None else [msgspec.msgpack.encode(value)]
                socket.send_multipart([client, uid, kind, *values])


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
