"""What the quicker import of torch leaves out, and how it comes back."""

from __future__ import annotations

import subprocess
import sys

from outrider.model.torch_import import import_all_of_torch, import_torch_quickly

REGISTERED = "registered = lambda: hasattr(sys.modules['torch._meta_registrations'], 'register_meta')\n"
SCRIPT = "import sys\nfrom outrider.model.torch_import import import_torch_quickly\n" + REGISTERED


def ran(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_model_runs_without_what_is_left_out_and_transformers_gets_it_back() -> None:
    script = (
        "import inspect\n"
        "search = inspect.getmodule\n"
        "import_torch_quickly()\n"
        "print(inspect.getmodule is search)\n"
        "import torch\n"
        "print(registered(), (torch.ones(2, 3) @ torch.ones(3, 2)).sum().item())\n"
        "import outrider.model.hf\n"
        "meta = torch.ones(2, 3, device='meta') @ torch.ones(3, 5, device='meta')\n"
        "print(registered(), tuple(meta.shape) == (2, 5))\n"
    )
    assert ran(script) == ["True", "False", "12.0", "True", "True"]


def test_a_torch_that_is_there_stays_whole() -> None:
    registrations = sys.modules["torch._meta_registrations"]
    assert hasattr(registrations, "register_meta")
    for again in (import_torch_quickly, import_all_of_torch):
        again()
        assert sys.modules["torch._meta_registrations"] is registrations
