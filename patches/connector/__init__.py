# SPDX-License-Identifier: Apache-2.0
"""KvextConnector: vLLM knows it by name, and it knows the scheduler that it works for.

Nothing is changed in an engine that is started without it.
"""
