"""`python -m pmae`."""

import sys

from pmae.cli import main

sys.exit(main())
