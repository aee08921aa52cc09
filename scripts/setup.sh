# Sourced by demo.sh and test.sh: says what is missing and how to get it, and makes the environment .venv.

python=${PYTHON:-python3}

missing() {
  printf '%s\n  %s\n' "$1" "$2" >&2
  exit 2
}

# True if version $1 is at least $2.
at_least() {
  [ "$(printf '%s\n%s\n' "$2" "$1" | sort -t. -k1,1n -k2,2n | head -n 1)" = "$2" ]
}

# Installs fastshard with the extras `$1` into .venv, and activates it: built from here, or the wheel FASTSHARD_WHEEL. Every
# package comes in the version that .ci/constraints.txt pins, in build environments too; `PIP_CONSTRAINT=` takes the newest.
# The path is relative: pip takes a space for the end of one.
setup() {
  command -v "$python" >/dev/null ||
    missing "Python 3.10 or newer is needed: there is no $python." "Install it, or name it: PYTHON=/path/to/python3 sh scripts/demo.sh"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    missing "Python 3.10 or newer is needed: $("$python" --version) is older." "Name a newer one: PYTHON=python3.12 sh scripts/demo.sh"
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    missing "Python's venv is missing." "On Debian and Ubuntu: sudo apt install python3-venv"
  if [ -z "${FASTSHARD_WHEEL-}" ]; then
    command -v cargo >/dev/null && command -v rustc >/dev/null ||
      missing "Rust 1.87 or newer is needed to build the core." "Get it from https://rustup.rs, then open a new shell."
    rust=$(rustc --version | cut -d ' ' -f 2)
    at_least "$rust" 1.87 ||
      missing "Rust 1.87 or newer is needed: this is $rust." "rustup update stable"
  fi
  "$python" -m venv .venv
  # shellcheck disable=SC1091
  . .venv/bin/activate
  pins=${PIP_CONSTRAINT-.ci/constraints.txt}
  PIP_CONSTRAINT=$pins PIP_BUILD_CONSTRAINT=$pins pip install -q "${FASTSHARD_WHEEL:-.}$1"
}
