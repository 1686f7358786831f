"""The command line `bi-audit`, also as `python -m bi_kernels.audit`."""

import sys

from bi_kernels.extras import extra


def main() -> None:
    """Runs `bi-audit`; without the extra `audit`, one sentence says what to install."""
    try:
        with extra("audit"):
            from bi_kernels.audit.cli import main as command  # noqa: PLC0415 (needs the extra)
    except ModuleNotFoundError as error:
        sys.exit(f"bi-audit: {error}")
    command()


if __name__ == "__main__":
    main()
