# SPDX-License-Identifier: Apache-2.0
"""Whose KV may meet: the name space of an engine, and the names of its objects.

An *identity* says all that decides what bytes of KV mean. Equal identities have one name space,
others never meet; its parts are readable, so that `differences` says why engines do not meet.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from vllm_ascend_kvext.store.entries import Kind, Piece

Identity = Mapping[str, Any]  # Plain data, by part.
FORMAT_VERSION = 3  # Of objects and names: those of another version are not looked at.

_ROWS_NAME = re.compile("R[0-9]{1,12}-[0-9]{1,12}-[0-9a-f]{32}")


def namespace_of(identity: Identity) -> str:
    """The name space: a name that other identities do not have."""
    text = json.dumps([FORMAT_VERSION, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def parse_identity(text: bytes) -> tuple[str, Identity]:
    """An identity that was written down as JSON, with its name space.

    Raises:
        ValueError: If it is none.
    """
    try:
        identity = json.loads(text)
        namespace = namespace_of(identity)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
    if not isinstance(identity, dict):
        raise ValueError(f"JSON of a {type(identity).__name__}, which is no object")
    return namespace, identity


def differences(here: Identity, there: Identity) -> list[str]:
    """Parts in which two identities differ, with their values where these are short."""
    found = []
    for part in sorted(here.keys() | there.keys()):
        one, other = (json.dumps(each.get(part), sort_keys=True) for each in (here, there))
        if one != other:
            is_short = len(one) + len(other) <= 60
            found.append(f"{part} ({one} here, {other} there)" if is_short else part)
    return found


def note_name(key: bytes) -> str:
    """The note that leads to rows before a boundary. 128 bits of its chained hash."""
    return f"N{key.hex()[:32]}"


def is_note(name: str) -> bool:
    """Whether this is a note's name, and not that of an object."""
    return name.rpartition("/")[2].startswith("N")


def is_rows_name(name: str) -> bool:
    """Whether this is the name of an object with rows of a prompt: what notes lead to."""
    return _ROWS_NAME.fullmatch(name) is not None


def object_name(piece: Piece, key: bytes, key_space: str = "") -> str:
    """The name of a piece that ends with a key of a key space; see ``Prefix.key_space``."""
    kind = key_space or ("T" if piece.kind is Kind.TAILS else "R")
    return f"{kind}{piece.first_tokens}-{piece.end_tokens}-{key.hex()[:32]}"


def piece_of(name: str) -> Piece:
    """The piece of an object of a prompt, whose name is one of `object_name`."""
    first, end, _ = name[1:].split("-")
    return Piece(Kind.TAILS if name[0] == "T" else Kind.ROWS, int(first), int(end))
