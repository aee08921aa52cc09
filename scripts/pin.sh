#!/bin/sh
# Renews .ci/constraints.txt: the exact version of every package that the tests use, for each Python that is supported.
# Commit it once the tests pass with it; `just newest` runs them with whatever is newest, and pins nothing.
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
# Without constraints: what is pinned already must not hold the pins back.
env -u PIP_CONSTRAINT -u PIP_BUILD_CONSTRAINT "$work/env/bin/pip" install -q uv
{
  printf '%s\n' "# Made by scripts/pin.sh; do not edit." "# Applied by scripts/setup.sh, to build environments too."
  # What pyproject.toml and tools.in ask for, with markers where Pythons differ. Only Linux is supported.
  "$work/env/bin/uv" pip compile -q --universal --python-version 3.10 --no-annotate --no-header --upgrade --all-extras \
    --group lint --group docs pyproject.toml .ci/tools.in
} > "$work/constraints.txt"
mv "$work/constraints.txt" .ci/constraints.txt
