#!/usr/bin/env bash
# Train the demo model with upstream's own train.py and put its weights at data/demo/gelan-digits.pt.
# Only needed to make those weights again: they are part of this repository.
#
#   usage, in a patched YOLOv9 checkout: data/demo/train_demo.sh [--epochs N] [--batch-size N] [--data DIR]
#                                        [--device D] [--workers N] [--seed N] [--name NAME] [--output FILE]
#
#   --epochs N      passes over the 1,000 training images (default: 110, 14 minutes on an H100; the last fifth without mosaic)
#   --batch-size N  images per step (default: 64, the batch that upstream's learning rates are meant for)
#   --data DIR      the demo set; drawn there when it is missing (default: datasets/digits)
#   --device D      0, or cpu (default: 0)
#   --workers N     loader processes (default: 12)
#   --seed N        seed of the training; the set itself is always drawn with seed 0 (default: 0)
#   --name NAME     results go to runs/train/NAME (default: digits)
#   --output FILE   where the weights go (default: data/demo/gelan-digits.pt)
#
# PYTHON names the interpreter (default: python).
set -euo pipefail
trap 'exit 130' INT # whatever the program that runs makes of Ctrl-C

limit=2000000 # bytes: what the repository takes for one weights file
epochs=110 batch=64 data=datasets/digits device=0 workers=12 seed=0 name=digits output=data/demo/gelan-digits.pt
python=${PYTHON:-python}

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
fail() {
  echo "error: $1" >&2
  exit 2
}

while (($#)); do
  case $1 in
    -h | --help)
      usage
      exit 0
      ;;
    --epochs | --batch-size | --data | --device | --workers | --seed | --name | --output)
      (($# > 1)) || fail "$1 needs a value"
      case $1 in
        --epochs) epochs=$2 ;;
        --batch-size) batch=$2 ;;
        --data) data=$2 ;;
        --device) device=$2 ;;
        --workers) workers=$2 ;;
        --seed) seed=$2 ;;
        --name) name=$2 ;;
        --output) output=$2 ;;
      esac
      shift 2
      ;;
    *) fail "unknown argument $1; -h lists them" ;;
  esac
done
[[ $epochs =~ ^[1-9][0-9]*$ ]] || fail "--epochs $epochs is not a whole number above 0"

cd "$(dirname "$0")/../.."
[[ -f train.py ]] || fail "$PWD is no YOLOv9 checkout; run this in a patched one (patch_yolov9.sh)"

"$python" data/demo/make_digits.py "$data"

# --cache ram and AdamW: an image is small and the run short. --cos-lr: smooth to the end.
# --close-mosaic: mosaic cuts digits apart; the last epochs see whole ones, as validation does.
# --noplots: upstream draws labels with a function that Pillow 10 dropped.
"$python" scripts/run_upstream.py train.py \
  --data "$data/data.yaml" --cfg data/demo/gelan-digits.yaml --weights '' --hyp data/demo/hyp.digits.yaml \
  --imgsz 320 --batch-size "$batch" --epochs "$epochs" --close-mosaic $(((epochs + 4) / 5)) \
  --optimizer AdamW --cos-lr --cache ram --workers "$workers" --device "$device" --seed "$seed" --noplots \
  --project runs/train --name "$name" --exist-ok

# upstream's stripped checkpoint: half precision, without the optimizer
weights=runs/train/$name/weights/best_striped.pt
[[ -f $weights ]] || fail "train.py left no $weights"
size=$(wc -c <"$weights")
((size <= limit)) || fail "$weights has $size bytes, more than the $limit that the repository takes"
cp "$weights" "$output.part" && mv "$output.part" "$output"
echo "$output: $size bytes"
