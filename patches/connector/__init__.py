# SPDX-License-Identifier: Apache-2.0
"""KvextConnector: vLLM learns its name, and the connector learns its scheduler.

Nothing is changed in an engine that is started without it.
"""
