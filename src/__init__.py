# SPDX-License-Identifier: Apache-2.0
"""stratagem: parallel training strategies as PyTorch Lightning plugins."""

if __name__ != "stratagem":  # `import src` would make a second registry and a second class of every name
    raise ImportError(f"this package is called 'stratagem', not {__name__!r}: run `pip install -e .` and import stratagem")

__version__ = "0.1.0"
