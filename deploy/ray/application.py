"""The application of models.toml beside it: `serve run application:application`, in this folder."""

from pathlib import Path

from outrider.cli.deploy import app

application = app({"file": str(Path(__file__).with_name("models.toml"))})
