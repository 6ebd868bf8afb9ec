"""Import this before shardrt. Where shardrt is not installed, this process and its children import it from this checkout."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])

if find_spec("shardrt") is None:
    # Last: comm/ and kernels/ are there too, and other packages have these names.
    sys.path.append(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), ROOT)))
