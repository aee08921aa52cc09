#!/bin/sh
# Builds the source distribution of what is committed, the wheel from that, and uses the wheel where there is no compiler: an
# emptied environment, wheels alone, from pip install to a converted checkpoint. `sh scripts/wheel.sh DIR` keeps both in DIR;
# `sh scripts/wheel.sh --check WHEEL` builds nothing and tries this one.
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home"

if [ "${1-}" = --check ]; then
  wheel=$(realpath "$2")
else
  # Made apart: what lies in DIR already is not taken for what was made.
  dist=$work/dist
  mkdir -p "$dist" "$work/source" ${1:+"$1"}
  git archive HEAD | tar -x -C "$work/source"
  python3 -m venv "$work/build"
  # zig links against the old glibc that manylinux asks for; without it the wheel is for systems as new as this one.
  "$work/build/bin/pip" install -q 'maturin>=1.7,<2' ziglang
  PATH=$work/build/bin:$PATH
  export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$work/target}"
  (cd "$work/source" && maturin sdist --out "$dist")
  mkdir "$work/unpacked"
  tar -x -C "$work/unpacked" --strip-components 1 -f "$dist"/fastshard-*.tar.gz
  (cd "$work/unpacked" && maturin build --release --zig --compatibility manylinux_2_28 --out "$dist")
  wheel=$(ls "$dist"/fastshard-*.whl)
  # What tests hold a run by is in no wheel that is released.
  python3 - "$wheel" <<'PYTHON'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
(core,) = (wheel.read(name) for name in wheel.namelist() if name.endswith(".so"))
for seam in (b"FASTSHARD_STEPS", b"FASTSHARD_CLOCK", b"FASTSHARD_FAIL_ALLOCATION"):
    assert seam not in core, f"the released core knows {seam.decode()}"
PYTHON
fi

python3 - "$wheel" <<'PYTHON'
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
print(f"{sys.argv[1].rpartition('/')[2]}: {__import__('os').path.getsize(sys.argv[1]) / 2**20:.2f} MiB")
for what in ("licenses/LICENSE", ".cyclonedx.json", "layouts/", "reporting/page.html", "schemas/", "py.typed"):
    assert any(what in name for name in names), f"the wheel has no {what}"
assert not any("tests/" in name or ".pyc" in name for name in names)
PYTHON

python3 -m venv "$work/user"
cat > "$work/use.sh" <<'USE'
set -eu
for compiler in cargo rustc gcc cc; do
  if command -v "$compiler"; then
    echo "there is a compiler here" >&2
    exit 1
  fi
done
started=$(python -c 'import time; print(time.time())')
python -m pip install -q --only-binary :all: "$1"
fastshard convert "$2" model --to hf --vocab-size 509
fastshard verify model
python -c "import sys, time; print(f'from pip install to a converted checkpoint: {time.time() - float(sys.argv[1]):.1f} s')" "$started"
USE
checkpoint=$PWD/tests/fixtures/gpt_neox/neox_pp_tp2
(cd "$work/home" && env -i PATH="$work/user/bin" HOME="$work/home" /bin/sh "$work/use.sh" "$wheel" "$checkpoint")
if [ -n "${1-}" ] && [ "$1" != --check ]; then
  cp "$dist"/fastshard-* "$1"
fi
