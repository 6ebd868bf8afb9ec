"""Import this before shardrt: where that is not installed, it is found in this checkout, here and in what a script starts."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])

if find_spec("shardrt") is None:
    # Last: comm/ and kernels/ lie there too, and their names belong to others.
    sys.path.append(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), ROOT)))
