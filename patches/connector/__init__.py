# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KvextConnector: vLLM learns its name, and the connector learns its scheduler.

Nothing is changed in an engine that is started without KvextConnector.
"""
