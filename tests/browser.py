"""Whether pages can be tested in a real browser here. `make browser` installs what is missing, where it can."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
SCREENSHOTS = ROOT / "build" / "screenshots"  # of the latest run, to look at
DRIVER = importlib.util.find_spec("playwright")
MISSING = "no Chromium here: make browser" if BROWSER is None else "no playwright here: make install"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER), reason=MISSING)
Look = Callable[
    ..., dict[str, Any]
]  # what a browser finds in a page, by the width and the colours of its screen
