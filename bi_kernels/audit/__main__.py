"""The command line `bi-audit`, also as `python -m bi_kernels.audit`."""

from bi_kernels.audit.cli import main

if __name__ == "__main__":
    main()
