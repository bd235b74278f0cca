# SPDX-License-Identifier: Apache-2.0
"""One config under several strategies, held against one process: what `stratagem compare` and `check` do."""
