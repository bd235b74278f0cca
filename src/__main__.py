# SPDX-License-Identifier: Apache-2.0
"""`python -m stratagem` is the command `stratagem`."""

import sys

from stratagem.cli import main

if __name__ == "__main__":
    sys.exit(main())
