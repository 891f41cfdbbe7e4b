# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what is computed where parts of prompts are missing; `run` is the command."""
