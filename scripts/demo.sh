#!/bin/sh
# Sets everything up in .venv and shows the main job on a real checkpoint: what it is, what happens to a broken one,
# the conversion, and the proof. The results stay in fastshard-demo.
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup ""

show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

checkpoint=tests/fixtures/gpt_neox/neox_pp_tp2
mkdir -p fastshard-demo
# What an earlier run of this script left; nothing else that lies there.
rm -rf fastshard-demo/broken fastshard-demo/model

show fastshard inspect $checkpoint

# One rank's file lies under another's name: every shape fits.
cp -R $checkpoint fastshard-demo/broken
step=fastshard-demo/broken/global_step4
cp $step/layer_03-model_00-model_states.pt $step/layer_03-model_01-model_states.pt
if show fastshard convert fastshard-demo/broken fastshard-demo/never --to hf || [ -e fastshard-demo/never ]; then
  echo "a broken checkpoint was published" >&2
  exit 1
fi

show fastshard convert $checkpoint fastshard-demo/model --to hf --vocab-size 509
show fastshard verify fastshard-demo/model
