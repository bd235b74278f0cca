# SPDX-License-Identifier: Apache-2.0
"""What keeps a long run going: it is watched, saved as often as it pays, stopped with grace and started again."""
