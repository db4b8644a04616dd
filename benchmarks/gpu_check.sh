#!/usr/bin/env bash
# Runs everything that needs GPUs; each part has a time limit, so that one that hangs does not stop the others.
#   OUT=/tmp/out benchmarks/gpu_check.sh PART ...     (default: tests train); the parts are the cases below
# Works where nothing can be installed: the package is used from the checkout, with the python that has torch.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-/tmp/overlapc_gpu}
gpus=$($python -c 'import torch; print(torch.cuda.device_count())')
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 OVERLAPC_CACHE_DIR=${OVERLAPC_CACHE_DIR:-/tmp/overlapc_cache}
mkdir -p "$out"
$python -m pip install -q --no-deps --no-build-isolation -e . 2>&1 | grep -v WARNING

part() { # name seconds command...
    local name=$1 seconds=$2
    shift 2
    echo "=== $name"
    timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1 || echo "$name: exit $?"
    grep -vE 'Warning|warn' "$out/$name.log" | tail -"${LINES_SHOWN:-30}" | cut -c1-260
}

for what in "${@:-tests train}"; do
    for each in $what; do
        case $each in
        tests) part tests 300 $python -m pytest -q -p no:cacheprovider tests/multigpu ;;
        parity) # these tests compare results and take no times, so they run at once
            test="$python -m pytest -q -p no:cacheprovider -rs --durations=5"
            CUDA_VISIBLE_DEVICES=0,1 part parity_one 120 $test tests/multigpu/test_cuda_graphs.py \
                tests/multigpu/test_deterministic.py tests/multigpu/test_device.py tests/multigpu/test_bucket_nccl.py &
            CUDA_VISIBLE_DEVICES=2,3 part parity_two 120 $test tests/multigpu/test_parity_nccl.py -k two &
            part parity_four 120 $test tests/multigpu/test_parity_nccl.py -k four &
            part parity_steps 130 $test tests/multigpu/test_parity_steps_nccl.py &
            wait
            ;;
        train) part train 300 $python benchmarks/train_step.py --parity --profile \
            --systems "${SYSTEMS:-overlapc,overlapc-none,eager,compile}" --rounds 3 --steps 4 --out "$out" ;;
        inductor) # the same in-graph FSDP compiled by Inductor, with each of its methods to overlap, in one alternating run
            part inductor 320 $python benchmarks/train_step.py --profile --rounds 3 --steps 4 --seconds 290 \
                --systems all --out "$out/inductor" ;;
        thrifty) NCCL_MAX_CTAS=16 part thrifty 200 $python benchmarks/train_step.py --profile \
            --systems overlapc,compile --rounds 3 --steps 4 --out "$out/thrifty" ;;
        calibrate) part calibrate 200 $python -m overlapc.launch.cli calibrate --device cuda --nproc "$gpus" \
            --name h200-nvlink --ranks-per-host 8 --out "$out/h200-nvlink.json" ;;
        contention) # with the profile just calibrated, if there is one
            profile=h200-nvlink
            [ -f "$out/h200-nvlink.json" ] && profile=$out/h200-nvlink.json
            LINES_SHOWN=150 part contention 110 torchrun --nproc-per-node "$gpus" benchmarks/contention.py --profile "$profile" \
                --channels "${CHANNELS:-0}" --out "$out/contention"
            ;;
        clock) # effect of load on the clock; one GPU
            LINES_SHOWN=300 part clock 80 $python benchmarks/clock.py --out "$out/clock" ;;
        predict) # calibrate; then predict whole steps, memory and collectives with that profile, and measure them
            part calibrate 170 $python -m overlapc.launch.cli calibrate --device cuda --nproc "$gpus" \
                --ranks-per-host 8 --out "$out/h200-nvlink.json"
            profile=h200-nvlink
            [ -f "$out/h200-nvlink.json" ] && profile=$out/h200-nvlink.json
            LINES_SHOWN=150 OVERLAPC_RANK_TIMEOUT=60 part predict 280 torchrun --nproc-per-node "$gpus" \
                benchmarks/predict.py --profile "$profile" --seconds "${PREDICT_SECONDS:-170}" --out "$out/predict" \
                ${PREDICT_ARGS:-}
            ;;
        measure) # every node predicted and measured, with the profile just calibrated, if there is one
            profile=h200-nvlink
            [ -f "$out/h200-nvlink.json" ] && profile=$out/h200-nvlink.json
            OVERLAPC_PROFILE=$profile part measure 200 $python benchmarks/train_step.py --profile \
                --systems overlapc --rounds 3 --steps 4 --out "$out/measure"
            $python -m overlapc.launch.cli report "$out/measure/record_overlapc.json" >"$out/measure/report.txt"
            grep -A60 '^predicted and measured' "$out/measure/report.txt" | head -60 | cut -c1-200
            ;;
        peaks) # planned and measured memory of 50 random models, on the first two GPUs
            for first in 0 10 20 30 40; do
                CUDA_VISIBLE_DEVICES=0,1 OMP_NUM_THREADS=1 LINES_SHOWN=15 part "peaks_$first" 200 $python -m torch.distributed.run \
                    --nproc-per-node 2 --master-port $((29600 + first)) benchmarks/random_peaks.py --device cuda --first "$first" --count 10 &
            done
            wait
            ;;
        lengths) # copies, NCCL, no communication and FSDP2 + compile at two lengths, and all 32 layers with AdamW
            systems=overlapc,overlapc-nccl,overlapc-compute,compile
            for seq in 4096 1024; do
                part "length_$seq" 115 $python benchmarks/train_step.py --profile --seq $seq --systems $systems \
                    --rounds 2 --steps 5 --seconds 105 --out "$out/length_$seq"
            done
            part layers_32 100 $python benchmarks/train_step.py --layers 32 --vocab 128256 --adamw --systems overlapc,compile \
                --rounds 2 --steps 4 --seconds 90 --out "$out/layers_32"
            ;;
        tensor_parallel) part tensor_parallel 200 $python benchmarks/train_step.py --tp "$gpus" --batch 2 --profile \
            --systems overlapc,overlapc-nccl,compile --rounds 2 --steps 5 --seconds 190 --out "$out/tensor_parallel" ;;
        kernels) LINES_SHOWN=90 part kernels 150 $python benchmarks/kernels.py --prepare 15 --seconds 115 ;;
        ops) # every operator of torch's database, on CUDA, sharded over this machine's cores
            shards=${SHARDS:-12}
            for ((i = 0; i < shards; i++)); do
                OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=$((i % gpus)) timeout "${OPS_SECONDS:-280}" $python -m tests.ops.sweep \
                    --device cuda --shapes static --samples "${SAMPLES:-2}" --shard "$i/$shards" --out "$out/ops_$i.jsonl" \
                    >"$out/ops_$i.log" 2>&1 &
            done
            wait
            cat "$out"/ops_*.jsonl >"$out/ops.jsonl"
            rm "$out"/ops_[0-9]*
            $python -m tests.ops.sweep --summary "$out/ops.jsonl" 2>&1 | tail -40 | cut -c1-300
            ;;
        *) echo "no part named $each; known: tests parity train inductor thrifty calibrate contention clock measure predict peaks lengths tensor_parallel kernels ops" >&2; exit 2 ;;
        esac
    done
done
