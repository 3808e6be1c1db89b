"""Builds the release of HEAD into dist/release: `make release`."""

from __future__ import annotations

import sys

from deploy.release import ROOT, ReleaseError, release

if __name__ == "__main__":
    into = ROOT / "dist" / "release"
    try:
        names = release(ROOT, into, *sys.argv[1:])
    except ReleaseError as error:
        sys.exit(f"no release: {error}")
    print(f"{into}, built twice with equal checksums:", *names, sep="\n  ")  # noqa: T201
    print("It is not signed yet; SECURITY.md says how to sign and to verify it.")  # noqa: T201
