#!/bin/sh
# Sets everything up in .venv and plays the story of the README: a broken checkpoint is refused; mended, it is converted, and
# proven. Then the same job at 1 GiB. The results stay in fastshard-demo.
set -eu
cd "$(dirname "$0")/.."
. scripts/setup.sh
need_tools

cat << 'END'
This builds fastshard into .venv, plays the story of the README and merges a checkpoint of 1 GiB. It takes about two minutes on
two cores, most of them compiling, once. Ctrl-C is safe: the next start goes on from there.
END
say "1/3 build and install"
setup "[report]"

show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

say "2/3 the story, on a small GPT-NeoX checkpoint of 2 tensor-parallel ranks"
mkdir -p fastshard-demo
cd fastshard-demo
# What an earlier run of this script left; nothing else that lies there.
rm -rf original run node1 by_hand model report.html big merged
show python -m fastshard.examples gpt_neox original
show python -m fastshard.examples gpt_neox run --to gpt_neox --tp 2
cp -R run node1
layer=global_step0/layer_03-model
printf '\nA file is copied over another: every name and every shape still fits.\n'
show cp run/${layer}_00-model_states.pt run/${layer}_01-model_states.pt
if python -c 'import torch, transformers' 2> /dev/null; then
  show python ../examples/merge_by_hand.py run/global_step0 original/config.json by_hand
  show python ../examples/compare_logits.py original by_hand
  oracle=yes
else
  printf '\n(The logits of the README need PyTorch and transformers: sh scripts/test.sh brings them.)\n'
  oracle=
fi
if show fastshard convert run model --to hf --vocab-size 500 || [ -e model ]; then
  echo "a broken checkpoint was published" >&2
  exit 1
fi
show fastshard report run -o report.html
show cp node1/${layer}_01-model_states.pt run/${layer}_01-model_states.pt
show fastshard convert run model --to hf --vocab-size 500
show fastshard verify model
show fastshard diff original model
[ -z "$oracle" ] || show python ../examples/compare_logits.py original model

# Less where that is only to be tried.
size=${FASTSHARD_DEMO_SIZE:-1GiB}
say "3/3 four ranks of $size in all"
if [ "$(df -Pk . | awk 'NR == 2 { print $4 }')" -gt 4000000 ]; then
  show python ../benches/synthetic.py big --size "$size"
  show fastshard merge big merged
  rm -rf big merged
else
  echo "left out: less than 4 GB of disk are free"
fi
say "done: fastshard-demo/report.html shows what was wrong with the broken checkpoint, fastshard-demo/model is the result"
echo "Next: . .venv/bin/activate; fastshard --help"
