# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A prefill node and a decode node, each an engine in its own process, and a proxy before them.

KV goes from one to the other by vLLM-Ascend's own Mooncake connectors and by Mooncake's own engine,
over TCP (`transfer_engine`). `node` is the program of a node. `nodes` starts nodes and steers them.
`proxy` sends requests to both, as the proxies of vLLM-Ascend's examples do.
"""
