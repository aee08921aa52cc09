#!/bin/sh
# Sets everything up in .venv and runs the tests; PyTorch and transformers come along, as oracles. With --all those too that
# take long, whose class a quicker test holds.
set -eu
cd "$(dirname "$0")/.."
case "$*" in
"") chosen="not slow" ;;
--all) chosen="slow or not slow" ;;
*)
  printf 'usage: sh scripts/test.sh [--all]\n' >&2
  exit 2
  ;;
esac
. scripts/setup.sh
setup '[test]'
# The wheel was built in the profile for tests, with which this then shares what it compiles.
cargo test --workspace ${FASTSHARD_WHEEL:+--profile tests}
python -m pytest -n auto --maxprocesses 8 -m "$chosen"
