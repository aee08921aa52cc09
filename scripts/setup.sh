# Sourced by demo.sh and test.sh: says what is missing and how to get it, and makes the environment .venv.

python=${PYTHON:-python3}
begun=$(date +%s)
log=target/setup.log
venv=${FASTSHARD_VENV:-.venv}
crates=

missing() {
  printf '%s\n  %s\n' "$1" "$2" >&2
  exit 2
}

# True if version $1 is at least $2.
at_least() {
  [ "$(printf '%s\n%s\n' "$2" "$1" | sort -t. -k1,1n -k2,2n | head -n 1)" = "$2" ]
}

# A line with the time since the start.
say() {
  passed=$(($(date +%s) - begun))
  printf '[%d:%02d] %s\n' $((passed / 60)) $((passed % 60)) "$*"
}

# The crates that the wheel is made of, once cargo has fetched them.
count_crates() {
  [ -n "$crates" ] || crates=$(cargo tree --offline --locked --quiet --prefix none --edges no-dev --package fastshard-py |
    sed 's/ (.*//' | sort -u | wc -l)
}

# What the command that writes to the log is at: the last line that says so.
at_work() {
  step=$(grep -o '\(Compiling [^ ]*\|^ *Downloading [^ (]*\|^ *Collecting [^ (]*\|Installing [a-z]* *[a-z]*\|Preparing metadata\)' "$log" |
    tail -n 1 | sed 's/^ *//; s|https\{0,1\}://.*/||')
  case "$step" in
  "") say "    still at it" ;;
  Compiling*)
    count_crates
    crate=${step#Compiling }
    [ "$crate" != fastshard ] || crate="fastshard itself, the longest"
    say "    $(grep -c 'Compiling ' "$log") of $crates crates, now $crate"
    ;;
  *) say "    $step" ;;
  esac
}

# Runs a command, its output in the log; says every 10 seconds what it does, and shows the end of the log if it fails.
watched() {
  mkdir -p target
  : > "$log"
  # The pause holds no output open: whoever reads it need not wait for its end.
  (while sleep 10 > /dev/null 2>&1; do at_work; done) &
  beat=$!
  trap 'kill "$beat" 2> /dev/null || :' EXIT
  "$@" > "$log" 2>&1 || {
    code=$?
    tail -n 40 "$log" >&2
    echo "this failed: $*; all that it said is in $log" >&2
    exit $code
  }
  kill "$beat" 2> /dev/null || :
  trap - EXIT
}

# Looks for what is needed, before anything is made.
need_tools() {
  command -v "$python" > /dev/null ||
    missing "Python 3.10 or newer is needed: there is no $python." "Install it, or name it: PYTHON=/path/to/python3 sh scripts/demo.sh"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    missing "Python 3.10 or newer is needed: $("$python" --version) is older." "Name a newer one: PYTHON=python3.12 sh scripts/demo.sh"
  "$python" -c 'import venv, ensurepip' 2> /dev/null ||
    missing "Python's venv is missing." "On Debian and Ubuntu: sudo apt install python3-venv"
  [ -z "${FASTSHARD_WHEEL-}" ] || return 0
  command -v cargo > /dev/null && command -v rustc > /dev/null ||
    missing "Rust 1.87 or newer is needed to build the core." "Get it from https://rustup.rs, then open a new shell."
  rust=$(rustc --version | cut -d ' ' -f 2)
  at_least "$rust" 1.87 ||
    missing "Rust 1.87 or newer is needed: this is $rust." "rustup update stable"
}

# Installs fastshard with the extras `$1` into .venv, or FASTSHARD_VENV, and activates it: built from here, or the wheel FASTSHARD_WHEEL. The
# build is optimised, without what takes a third of its time (profile `demo`). Every package comes in the version that
# .ci/constraints.txt pins, in build environments too; `PIP_CONSTRAINT=` takes the newest. The path is relative: pip takes a
# space for the end of one.
setup() {
  watched "$python" -m venv "$venv"
  # shellcheck disable=SC1091
  . "$venv/bin/activate"
  pins=${PIP_CONSTRAINT-.ci/constraints.txt}
  export MATURIN_PEP517_ARGS="--profile demo"
  PIP_CONSTRAINT=$pins PIP_BUILD_CONSTRAINT=$pins watched pip install -v "${FASTSHARD_WHEEL:-.}$1"
}
