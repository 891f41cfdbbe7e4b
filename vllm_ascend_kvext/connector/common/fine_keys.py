# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Keys of prefixes that end between two hashes of vLLM.

vLLM hashes a request block by block. In a model with states, a block may have 2,000 tokens. The
host tier keeps states at shorter distances, so it needs more keys. A key within a block continues
the hash of the tokens before that block::

    tokens     0        64       128      192      256
    vLLM       ·                                   B1         = hash(nothing, tokens 0 to 255)
    keys       ·        K1       K2       K3       B1         K2 = hash(K1, tokens 64 to 127)

At the end of a block, vLLM's own hash is the key. Adapters, images and salts count in every key,
because the function that hashes adds them as vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from vllm_ascend_kvext.store.prefix import HashedPrefix
from vllm_ascend_kvext.upstream_types import Request

HashTokens = Callable[[bytes | None, Request, int, int], bytes]
"""Hashes tokens of a request, and all that vLLM hashes with them.

The arguments are the hash of the tokens before, or None if there are none; the request; the first
token; and the token behind the last one.
"""


class FineKeys:
    """The keys of the requests of one engine.

    Args:
        tokens_per_key: Tokens between two keys. It divides ``tokens_per_hash``.
        tokens_per_hash: Tokens between two hashes of vLLM.
        hash_tokens: Makes a key.
    """

    def __init__(self, tokens_per_key: int, tokens_per_hash: int, hash_tokens: HashTokens) -> None:
        self._tokens_per_key = tokens_per_key
        self._tokens_per_hash = tokens_per_hash
        self._hash_tokens = hash_tokens
        self._keys: WeakKeyDictionary[Request, list[bytes]] = WeakKeyDictionary()

    def prefix(self, request: Request) -> HashedPrefix:
        """The tokens of a request that have keys."""
        keys = self._keys.get(request)
        if keys is None or not self._continue(keys, request):
            keys = self._keys[request] = []
        hashes = request.block_hashes
        num_tokens = len(keys) * self._tokens_per_key
        while num_tokens + self._tokens_per_key <= request.num_tokens:
            first_tokens = num_tokens
            num_tokens += self._tokens_per_key
            num_hashes, rest_tokens = divmod(num_tokens, self._tokens_per_hash)
            if rest_tokens:
                before = keys[-1] if keys else None
                keys.append(self._hash_tokens(before, request, first_tokens, num_tokens))
            elif num_hashes <= len(hashes):
                keys.append(hashes[num_hashes - 1])
            else:
                break
        return HashedPrefix(keys, self._tokens_per_key, HashedPrefix(hashes, self._tokens_per_hash))

    def forget(self, request: Request) -> None:
        """Some tokens of a request are replaced by others."""
        self._keys.pop(request, None)

    def _continue(self, keys: list[bytes], request: Request) -> bool:
        """Whether vLLM's hashes are still those of some keys, and the request has their tokens.

        Keys behind the last of these hashes are not compared: only a session replaces tokens, and
        `forget` is called then.
        """
        keys_per_hash = self._tokens_per_hash // self._tokens_per_key
        num_hashes = len(keys) // keys_per_hash
        hashes = request.block_hashes
        return (
            len(keys) * self._tokens_per_key <= request.num_tokens
            and num_hashes <= len(hashes)
            and (not num_hashes or hashes[num_hashes - 1] == keys[num_hashes * keys_per_hash - 1])
        )
