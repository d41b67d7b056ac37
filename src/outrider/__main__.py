"""`python -m outrider` is `outrider`."""

from outrider.cli.main import run

if __name__ == "__main__":
    run()
