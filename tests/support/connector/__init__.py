# SPDX-License-Identifier: Apache-2.0
"""Workers of the connector: small ones, slow ones, ones that fail."""
