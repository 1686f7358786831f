"""The digest by which a report tells of which kernels it is."""

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
MODULES = "checks", "compat", "contract", "grads", "launch", "op", "parameters", "scalars", "tokens"  # which ops import
FILES = "ops/**/*.py", "ops/**/*.toml", "contract.toml", *(f"{name}.py" for name in MODULES)


def digest(package: Path = PACKAGE) -> str:
    """Returns 12 hex digits of a SHA-256 of the kernels, what they import, and the contract."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in package.glob(pattern)}):
        found.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]
