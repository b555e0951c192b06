#!/usr/bin/env bash
# The whole method on a laptop: collect -> SFT -> mine -> RL -> evaluate, in a real browser, offline, on the CPU.
#
#   bash scripts/demo.sh            writes runs/demo   (a table, summary.json, report.html)
#   bash scripts/demo.sh --smoke    the same stages on a handful of tasks and steps; writes runs/smoke; its figures mean nothing
#   bash scripts/demo.sh --no-browser    the same on the replay of the sites, in a fraction of the time and without Chromium; writes runs/replay
#
# This file is the tutorial: each stage is one script with its flags, and the same script trains Qwen3-VL on GPUs with the paper's values
# (its --help names them). The teacher and the judges are scripted and run behind an HTTP endpoint in the OpenAI chat format; the base is
# a tiny Qwen3-VL (rmsweb/playground/base) trained on generic drills, never on a page of these sites.
set -euo pipefail
cd "$(dirname "$0")/.."

# ------------------------------------------------------------------------------------------------------------- sizes
FOLDER=runs/demo
TRAIN_TASKS=240 DEV_TASKS=32 HELD_OUT_TASKS=36  # tasks of each split; held-out ones use names and two templates that no other split has
MAX_STEPS=12                                    # agent turns of a run
POOL_RUNS=1 RUNS=3                              # runs of the SFT policy on each training task; runs of each policy on each held-out task (paper: 3)
SFT_EPOCHS=4 SFT_BATCH=16 SFT_LR=1e-3           # paper: 3, 32, 1e-4
FOLLOWERS=2                                     # steps of the success behind each mined state that RL sees too (paper: 0)
RL_STEPS=100 RL_LR=3e-5                         # paper: not stated, 8e-6
TRAIN_BATCH=8 MINI_BATCH=4 GENERATIONS=4        # B, M and generation batches a step (paper: 64, 16, 16)
CONCURRENCY=4                                   # browsers at a time (paper: 16)
PLACE=playground SETUP=() SMOKE=""              # where tasks are run: the sites in a real browser
for argument in "$@"; do
  case "$argument" in
    --smoke)
      FOLDER=runs/smoke SMOKE=yes
      TRAIN_TASKS=10 DEV_TASKS=3 HELD_OUT_TASKS=3 MAX_STEPS=6 POOL_RUNS=1
      SFT_EPOCHS=2 RL_STEPS=3 TRAIN_BATCH=4 MINI_BATCH=2 GENERATIONS=2
      ;;
    --no-browser) PLACE=replay SETUP=(--no-browser) CONCURRENCY=16 ;;
    *) echo "demo.sh: unknown argument $argument (expected --smoke or --no-browser)" >&2; exit 2 ;;
  esac
done
[ "$PLACE$SMOKE" != replay ] || FOLDER=runs/replay
[ "$PLACE$SMOKE" != replayyes ] || FOLDER=runs/smoke-replay
OUT=${DEMO_OUT:-$FOLDER}
BASE=rmsweb/playground/base     # stands where Qwen3-VL-8B-Instruct stands
PROMPT=scripts/demo_prompt.json # the paper's prompt in small: one picture of at most 16 tokens, the last two goals as history

# --------------------------------------------------------------------------------------------------------- machinery
TEACHER_PID=""
cleanup() { if [ -n "$TEACHER_PID" ]; then kill "$TEACHER_PID" 2>/dev/null || true; wait "$TEACHER_PID" 2>/dev/null || true; fi; }
trap cleanup EXIT
trap 'exit 130' INT TERM

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
STARTED=$SECONDS
TIMES=""
timed() { # timed STAGE COMMAND...: shows the command, runs it, adds its seconds to the stage
  local stage=$1 before=$SECONDS
  shift
  printf '\n== %s (%d s so far)\n$ %s\n' "$stage" $((SECONDS - STARTED)) "$*"
  "$@" 9>&-
  TIMES+="$stage $((SECONDS - before))"$'\n'
}
run() { local stage=$1; shift; timed "$stage" .venv/bin/python "$@"; }

mkdir -p "$(dirname "$OUT")"
exec 9>"$OUT.lock"
flock -n 9 || { echo "demo.sh: another run is writing $OUT; set DEMO_OUT to another folder" >&2; exit 2; }
timed setup bash scripts/setup.sh "${SETUP[@]}"
rm -rf "$OUT"
mkdir -p "$OUT"

# -------------------------------------------------------------------------------------------------- 1 tasks and roles
run collect -m rmsweb.playground tasks --out "$OUT/tasks" --train $TRAIN_TASKS --dev $DEV_TASKS --held-out $HELD_OUT_TASKS
: >"$OUT/teacher.log" # it is read below, maybe before the teacher has opened it
.venv/bin/python -m rmsweb.playground teacher --port 0 >>"$OUT/teacher.log" 2>&1 9>&- &
TEACHER_PID=$!
URL=""
for _ in $(seq 100); do
  URL=$(sed -n 's/^\(http[^ ]*\) serves.*/\1/p' "$OUT/teacher.log")
  [ -z "$URL" ] || break
  kill -0 "$TEACHER_PID" 2>/dev/null || break
  sleep 0.2
done
[ -n "$URL" ] || { echo "demo.sh: the scripted teacher did not start:" >&2; cat "$OUT/teacher.log" >&2; exit 1; }

# ---------------------------------------------- 2 collection: the teacher tries, fails, is given a reflection, tries again
COLLECT=(--policy-url "$URL" --policy-model scripted-teacher --reflection-model scripted-reflection --extraction-model scripted-extractor
  --prompt-config "$PROMPT" --tokenizer "$BASE" --max-steps $MAX_STEPS --concurrency $CONCURRENCY --rounds 5 --successes 2 --seed 0
  --environment $PLACE)
run collect collect.py --tasks "$OUT/tasks/train.jsonl" --split train --out "$OUT/collect" "${COLLECT[@]}"
run collect collect.py --tasks "$OUT/tasks/dev.jsonl" --split dev --out "$OUT/collect-dev" "${COLLECT[@]}"

# ------------------------------------------------------------------- 3 supervised fine-tuning on the successful steps
run sft train_sft.py --model "$BASE" --samples "$OUT/collect/samples.jsonl" --dev-samples "$OUT/collect-dev/samples.jsonl" --out "$OUT/train-sft" \
  --epochs $SFT_EPOCHS --lr $SFT_LR --per-device-batch $SFT_BATCH --accumulation 1 --warmup-ratio 0.05 --lora-rank 64 --lora-alpha 128 --threads 1 --seed 42
SFT="$OUT/train-sft/checkpoint-best"

# ------------------------------------- 4 mining: where do runs of the same task part, one succeeding and one failing?
run pool evaluate.py --policy "$SFT" --tasks "$OUT/tasks/train.jsonl" --split train --out "$OUT/pool" --runs $POOL_RUNS --max-steps $MAX_STEPS \
  --temperature 1 --top-p 1 --top-k 0 --stop-on-stall --concurrency $CONCURRENCY --seed 1 --environment $PLACE
MINE=(--judge-url "$URL" --judge-model scripted-failure-judge --tokenizer "$BASE" --followers $FOLLOWERS)
run mine mine.py --pool "$OUT/collect" "$OUT/pool" --split train --out "$OUT/mined" "${MINE[@]}"
run mine mine.py --pool "$OUT/collect-dev" --split dev --out "$OUT/mined-dev" "${MINE[@]}"

# --------------------------------------- 5 Salvage-DS on the mined states and those behind them, without a browser
run rl train_rl.py --model "$SFT" --states "$OUT"/mined/{mined,followers}.jsonl --dev-states "$OUT"/mined-dev/{mined,ordinary}.jsonl \
  --out "$OUT/train-rl" --max-steps $RL_STEPS --lr $RL_LR --train-batch $TRAIN_BATCH --mini-batch $MINI_BATCH --num-rollouts 8 \
  --max-generation-batches $GENERATIONS --lora-rank 32 --lora-alpha 64 --response-budget 40 --threads 1 --seed 42
RL="$OUT/train-rl/checkpoint-last" # as in the study: these few dev states are answered right from the start, so checkpoint-best would be chance

# ------------------------------------------------------------------ 6 evaluation on held-out tasks, the same way for all
EVALUATE=(--tasks "$OUT/tasks/held-out.jsonl" --split held-out --runs $RUNS --max-steps $MAX_STEPS --stop-on-stall --concurrency $CONCURRENCY --seed 0
  --environment $PLACE)
run evaluate evaluate.py --policy "$BASE" --out "$OUT/base" "${EVALUATE[@]}"
run evaluate evaluate.py --policy "$SFT" --out "$OUT/sft" "${EVALUATE[@]}"
run evaluate evaluate.py --policy "$RL" --out "$OUT/rl" "${EVALUATE[@]}"

# --------------------------------------------------------------------------------------------------------- 7 the report
printf '%stotal %d\n' "$TIMES" $((SECONDS - STARTED)) | awk '{s[$1] += $2} END {printf "{"; for (k in s) printf "%s\"%s\": %d", (n++ ? ", " : ""), k, s[k]; print "}"}' \
  >"$OUT/seconds.json"
run report -m rmsweb.report "$OUT"/{base,sft,rl,collect,collect-dev,train-sft,pool,mined,mined-dev,train-rl} --out "$OUT" --seconds "$OUT/seconds.json" --tokenizer "$BASE"
[ -z "$SMOKE" ] || echo "This was the smoke run: it shows that every stage works; its figures mean nothing."
