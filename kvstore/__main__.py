"""`python -m kvstore` is the command `kvstore`."""

import sys

from kvstore.cli import main

sys.exit(main())
