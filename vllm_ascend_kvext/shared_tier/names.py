# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The name space of an engine, and the names of its objects. They decide which engines share KV.

An *identity* has everything that decides what bytes of KV mean. Engines with equal identities have
the same name space. Other engines never share KV. The parts of an identity are readable, so that
`differences` can say why engines do not share.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from vllm_ascend_kvext.store.entries import Kind, Piece

Identity = Mapping[str, Any]
"""Plain data, by the name of the part."""

FORMAT_VERSION = 4
"""The format of objects and names. Objects of another version are ignored."""

_ROWS_NAME = re.compile("R[0-9]{1,12}-[0-9]{1,12}-[0-9a-f]{32}")


def namespace_of(identity: Identity) -> str:
    """The name space of an identity. Different identities have different name spaces."""
    text = json.dumps([FORMAT_VERSION, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def parse_identity(text: bytes) -> tuple[str, Identity]:
    """Read an identity that was written as JSON.

    Returns:
        Its name space, and the identity.

    Raises:
        ValueError: If the text is no identity.
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
    """The parts in which two identities differ, with their values if these are short."""
    found = []
    for part in sorted(here.keys() | there.keys()):
        one, other = (json.dumps(each.get(part), sort_keys=True) for each in (here, there))
        if one != other:
            is_short = len(one) + len(other) <= 60
            found.append(f"{part} ({one} here, {other} there)" if is_short else part)
    return found


def note_name(key: bytes) -> str:
    """The name of the note for the rows before a boundary: 128 bits of the chained hash."""
    return f"N{key.hex()[:32]}"


def is_note(name: str) -> bool:
    """Whether a name is the name of a note, and not of an object."""
    return name.rpartition("/")[2].startswith("N")


def is_rows_name(name: str) -> bool:
    """Whether an object of this name has rows of a prompt. Notes lead to such objects."""
    return _ROWS_NAME.fullmatch(name) is not None


def object_name(piece: Piece, key: bytes, key_space: str = "") -> str:
    """The name of a piece that ends with a key of a key space; see ``Prefix.key_space``."""
    kind = key_space or ("T" if piece.kind is Kind.TAILS else "R")
    return f"{kind}{piece.first_tokens}-{piece.end_tokens}-{key.hex()[:32]}"


def piece_of(name: str) -> Piece:
    """The piece of a prompt's object, from a name that `object_name` has made."""
    first, end, _ = name[1:].split("-")
    return Piece(Kind.TAILS if name[0] == "T" else Kind.ROWS, int(first), int(end))
