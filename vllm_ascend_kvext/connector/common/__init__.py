# SPDX-License-Identifier: Apache-2.0
"""What both sides of the connector say to each other, and to those who watch them."""
