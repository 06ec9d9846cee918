#!/usr/bin/env bash
# Train the demo model with upstream's own train.py and put its weights at data/demo/gelan-digits.pt.
# Only needed to make those weights again: they are part of this repository.
#
#   usage, in a patched YOLOv9 checkout: data/demo/train_demo.sh [--segments] [--epochs N] [--batch-size N] [--data DIR]
#                                        [--device D] [--workers N] [--seed N] [--name NAME] [--output FILE]
#
#   --segments      train the model with masks instead: upstream's segment/train.py, from data/demo/gelan-digits.pt
#   --epochs N      passes over the 1,000 training images (default: 110, 14 minutes on an H100; the last fifth without mosaic;
#                   with --segments 80)
#   --batch-size N  images per step (default: 64, the batch that upstream's learning rates are meant for)
#   --data DIR      the demo set; drawn there when it is missing (default: datasets/digits, or datasets/digits-segments)
#   --device D      0, or cpu (default: 0)
#   --workers N     loader processes (default: 12)
#   --seed N        seed of the training; the set itself is always drawn with seed 0 (default: 0)
#   --name NAME     results go to runs/train/NAME (default: digits, or digits-seg)
#   --output FILE   where the weights go (default: data/demo/gelan-digits.pt, or data/demo/gelan-digits-seg.pt)
#
# PYTHON names the interpreter (default: python).
set -euo pipefail
trap 'exit 130' INT # whatever the program that runs makes of Ctrl-C

segments='' epochs='' batch=64 data='' device=0 workers=12 seed=0 name='' output=''
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
    --segments)
      segments=yes
      shift
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
# limit, in bytes: what the repository takes for these weights
if [[ $segments ]]; then
  limit=2300000 model=gelan-digits-seg epochs=${epochs:-80} data=${data:-datasets/digits-segments} name=${name:-digits-seg}
else
  limit=2000000 model=gelan-digits epochs=${epochs:-110} data=${data:-datasets/digits} name=${name:-digits}
fi
output=${output:-data/demo/$model.pt}
[[ $epochs =~ ^[1-9][0-9]*$ ]] || fail "--epochs $epochs is not a whole number above 0"

cd "$(dirname "$0")/../.."
[[ -f train.py ]] || fail "$PWD is no YOLOv9 checkout; run this in a patched one (patch_yolov9.sh)"

"$python" data/demo/make_digits.py ${segments:+--segments} "$data"

# --cache ram and AdamW: an image is small and the run short. --cos-lr: smooth to the end.
# --noplots: upstream draws labels with a function that Pillow 10 dropped.
common=(--data "$data/data.yaml" --cfg "data/demo/$model.yaml" --imgsz 320 --batch-size "$batch" --epochs "$epochs"
  --optimizer AdamW --cos-lr --cache ram --workers "$workers" --device "$device" --seed "$seed" --noplots
  --name "$name" --exist-ok)
if [[ $segments ]]; then
  # --no-overlap: a digit's mask is its own, as in validation. --noval: the last epoch is what is kept.
  run=runs/train-seg/$name
  mkdir -p "$run"
  "$python" scripts/run_upstream.py data/demo/train_masks.py data/demo/gelan-digits.pt "$run/start.pt" "${common[@]}" \
    --hyp data/demo/hyp.digits-seg.yaml --no-overlap --noval --project runs/train-seg
  weights=$run/weights/last.pt
else
  # --close-mosaic: mosaic cuts digits apart; the last epochs see whole ones, as validation does.
  "$python" scripts/run_upstream.py train.py "${common[@]}" --weights '' --hyp data/demo/hyp.digits.yaml \
    --close-mosaic $(((epochs + 4) / 5)) --project runs/train
  weights=runs/train/$name/weights/best_striped.pt
fi

# upstream's stripped checkpoint: half precision, without the optimizer
[[ -f $weights ]] || fail "train.py left no $weights"
size=$(wc -c <"$weights")
((size <= limit)) || fail "$weights has $size bytes, more than the $limit that the repository takes"
cp "$weights" "$output.part" && mv "$output.part" "$output"
echo "$output: $size bytes"
