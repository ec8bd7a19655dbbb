"""The command line."""


def main() -> None:
    """Entry point of the `casckpt` command."""
