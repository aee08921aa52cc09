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
need_tools
cat << 'END'
This builds fastshard into .venv, installs PyTorch and transformers (about 3 GB), and runs all tests. On two cores that takes about
20 minutes, of which 3 are for the installation.
END
say "1/3 build and install"
setup '[test]'
say "2/3 the core's tests"
# The wheel was built in the profile for tests, with which this then shares what it compiles.
cargo test --workspace ${FASTSHARD_WHEEL:+--profile tests}
say "3/3 the package's tests"
# With the reason for each test that is skipped: most need a framework that is not installed.
python -m pytest -n auto --maxprocesses 8 -m "$chosen" -rs
