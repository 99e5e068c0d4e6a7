#!/usr/bin/env bash
# A study of the paper's claims in small, as plain train.py commands; results.csv has the runs that were made so far:
#
#   python prepare_data.py && python prepare_data.py --dataset shakespeare
#   bash assets/study.sh                  all parts, which is for a night and more on two cores
#   bash assets/study.sh models context   some of them
#
# A run that is finished is skipped, one that was stopped goes on: start it again as often as you like.
set -euo pipefail
cd "$(dirname "$0")/.."

train() {  # train NAME [FLAG ...]
    local folder=out/study/$1
    shift
    if [ -e "$folder/ckpt.pt" ]; then
        python train.py --resume --out_dir "$folder"
    else
        python train.py --out_dir "$folder" "$@"
    fi
}

all_models() {  # all_models SEED
    train "transformer-$1" --seed "$1"
    for mode in identity learnable constant sparse plus; do
        train "$mode-$1" --seed "$1" --value_residual --lambda_mode "$mode"
    done
    train "svformer-$1" --seed "$1" --shared_value
}

models() { all_models 1337; }

seeds() { all_models 1338; all_models 1339; }

context() {  # SVFormer against context length (256 is in `models`), with the same tokens per step, and against the learning rate
    for length in 128 512 1024; do
        train "transformer-context$length" --block_size "$length" --batch_size $((4096 / length))
        train "svformer-context$length" --block_size "$length" --batch_size $((4096 / length)) --shared_value
    done
    train transformer-half-lr --learning_rate 1e-3
    train svformer-half-lr --learning_rate 1e-3 --shared_value
}

data() {  # fewer steps, each with a full schedule, for identity and the best variant of `seeds`
    for steps in 570 540 480 420; do
        for mode in identity plus; do
            train "$mode-$steps" --max_iters "$steps" --value_residual --lambda_mode "$mode"
        done
    done
}

width() {  # fewer parameters, next to a Transformer with as few
    for width in 120 112 104; do
        train "transformer-width$width" --n_embd "$width"
        for mode in identity plus; do
            train "$mode-width$width" --n_embd "$width" --value_residual --lambda_mode "$mode"
        done
    done
}

long() {  # the saving of data at four times the steps
    train transformer-2400 --max_iters 2400
    for steps in 2400 2160 1920; do
        for mode in identity plus; do
            train "$mode-$steps" --max_iters "$steps" --value_residual --lambda_mode "$mode"
        done
    done
}

shakespeare() {  # the CPU settings of nanoGPT's README, validated on the whole split
    local settings="--dataset shakespeare --n_layer 4 --n_head 4 --block_size 64 --batch_size 12 --max_iters 2000
        --learning_rate 1e-3 --min_lr 1e-4 --warmup_iters 100 --beta2 0.99 --eval_interval 500 --eval_iters 0"
    for seed in 1337 1338 1339; do
        train "shakespeare-transformer-$seed" --seed "$seed" $settings
        train "shakespeare-learnable-$seed" --seed "$seed" $settings --value_residual
        train "shakespeare-svformer-$seed" --seed "$seed" $settings --shared_value
    done
}

parts="models shakespeare context data width seeds long"
for part in ${*:-$parts}; do
    [[ " $parts " == *" $part "* ]] || { echo "unknown part $part: choose from $parts" >&2; exit 2; }
    "$part"
done
