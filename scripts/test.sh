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
# The core's tests are compiled and run beside the others. The wheel of `.ci/run` was built in the profile for tests, with which
# this then shares what it compiles.
mkdir -p target
printf 'the tests of the core run beside: target/core-tests.log\n'
cargo test --workspace ${FASTSHARD_WHEEL:+--profile tests} >target/core-tests.log 2>&1 &
core=$!
trap 'kill $core 2>/dev/null || :' EXIT
trap 'exit 130' INT TERM
code=0
python -m pytest -n auto --maxprocesses 8 -m "$chosen" || code=$?
wait $core || code=$?
cat target/core-tests.log
exit $code
