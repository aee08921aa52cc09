#!/bin/sh
# Sets everything up in .venv and runs all tests; PyTorch and transformers come along, as oracles.
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup -q '.[test]'
cargo test --workspace
python -m pytest
