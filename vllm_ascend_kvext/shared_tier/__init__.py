# SPDX-License-Identifier: Apache-2.0
"""KV that outlives an engine, and that engines share: objects by name, in somebody else's care.

`backend` is what every one promises; `files` and `mooncake` are two. `names` says whose KV may
meet, `search` what a prompt finds. Nothing here knows vLLM; without the option ``shared_tier``
nothing imports it.
"""
