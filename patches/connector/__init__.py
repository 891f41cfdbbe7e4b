# SPDX-License-Identifier: Apache-2.0
"""KvextConnector: vLLM gets to know its name, and it gets to know its scheduler.

Nothing is changed in an engine that is started without it.
"""
