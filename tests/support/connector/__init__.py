# SPDX-License-Identifier: Apache-2.0
"""Workers of the connector: small workers, slow workers, and workers that fail."""
