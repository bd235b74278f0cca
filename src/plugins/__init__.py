# SPDX-License-Identifier: Apache-2.0
"""One folder per family of techniques. Plugins know no other plugin; they meet through entry points."""
