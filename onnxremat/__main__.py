"""``python -m onnxremat``."""

import sys

from .cli import main

sys.exit(main())
